#include "experts.h"

#include <algorithm>
#include <cmath>

namespace octavo {

namespace {

void route_one(const Routing& routing, const float* scores, int32_t* experts, float* weights) {
    bool taken[kMaxExperts] = {};
    for (int64_t k = 0; k < routing.top_k; ++k) {
        int64_t best = -1;
        for (int64_t e = 0; e < routing.num_experts; ++e) {
            // Of equal scores the first. NOTE: a NaN must leave a valid expert, whatever it is.
            if (!taken[e] && (best < 0 || scores[e] > scores[best])) {
                best = e;
            }
        }
        taken[best] = true;
        experts[k] = static_cast<int32_t>(best);
    }
    const float highest = scores[experts[0]];
    float sum = 0.0F;
    for (int64_t k = 0; k < routing.top_k; ++k) {
        weights[k] = exp_of(scores[experts[k]] - highest);
        sum += weights[k];
    }
    if (!routing.renormalise) {
        sum = 0.0F;
        for (int64_t e = 0; e < routing.num_experts; ++e) {
            sum += exp_of(scores[e] - highest);
        }
    }
    for (int64_t k = 0; k < routing.top_k; ++k) {
        weights[k] /= sum;
    }
}

}  // namespace

float exp_of(float x) { return static_cast<float>(std::exp(static_cast<double>(x))); }

void Pairs::make_room(int64_t num_pairs, int64_t num_experts) {
    const auto size = std::max(experts.size(), static_cast<size_t>(num_pairs));
    experts.resize(size);
    weights.resize(size);
    places.resize(size);
    tokens.resize(size);
    starts.resize(std::max(starts.size(), static_cast<size_t>(num_experts) + 1));
}

void route(const Routing& routing, Pairs& pairs, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
        route_one(routing, routing.scores + token * routing.num_experts,
                  pairs.experts.data() + token * routing.top_k,
                  pairs.weights.data() + token * routing.top_k);
    }
}

void place(const Routing& routing, Pairs& pairs, int64_t num_tokens) {
    const int64_t num_pairs = num_tokens * routing.top_k;
    int32_t* starts = pairs.starts.data();
    std::fill_n(starts, routing.num_experts + 1, 0);
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        ++starts[pairs.experts[static_cast<size_t>(pair)] + 1];
    }
    for (int64_t e = 1; e <= routing.num_experts; ++e) {
        starts[e] += starts[e - 1];
    }
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        const auto index = static_cast<size_t>(pair);
        const int32_t place = starts[pairs.experts[index]]++;
        pairs.places[index] = place;
        pairs.tokens[static_cast<size_t>(place)] = static_cast<int32_t>(pair / routing.top_k);
    }
    // Each entry has moved on to the next expert's start: back by one.
    std::copy_backward(starts, starts + routing.num_experts, starts + routing.num_experts + 1);
    starts[0] = 0;
}

void combine(const cpu::Matrix& dst, const float* results, const Pairs& pairs, int64_t top_k,
             int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
        auto* to = reinterpret_cast<float*>(dst.row(token));
        std::fill_n(to, dst.cols, 0.0F);
        for (int64_t pair = token * top_k; pair < (token + 1) * top_k; ++pair) {
            const float weight = pairs.weights[static_cast<size_t>(pair)];
            const float* from = results + pairs.places[static_cast<size_t>(pair)] * dst.cols;
            for (int64_t c = 0; c < dst.cols; ++c) {
                to[c] += weight * from[c];
            }
        }
    }
}

}  // namespace octavo

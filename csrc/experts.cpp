#include "experts.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/check.h"

namespace octavo {

namespace {

// Of the untaken ones the highest, of equal ones the first. NOTE: a NaN must leave a valid expert,
// whatever it is.
int64_t highest_of(const float* choice, const bool* taken, int64_t begin, int64_t end) {
    int64_t best = -1;
    for (int64_t e = begin; e < end; ++e) {
        if (!taken[e] && (best < 0 || choice[e] > choice[best])) {
            best = e;
        }
    }
    return best;
}

// Marks the experts of all groups but the best ones as taken.
void close_groups(const Routing& routing, const float* choice, bool* taken) {
    const RoutingOptions& options = routing.options;
    const int64_t size = routing.num_experts / options.num_groups;
    float best[kMaxExperts];
    bool open[kMaxExperts] = {};
    for (int64_t g = 0; g < options.num_groups; ++g) {
        bool counted[kMaxExperts] = {};
        best[g] = 0.0F;
        for (int64_t i = 0; i < std::min(options.best_of_group, size); ++i) {
            const int64_t e = highest_of(choice, counted, g * size, (g + 1) * size);
            counted[e] = true;
            best[g] += choice[e];
        }
    }
    for (int64_t i = 0; i < options.top_groups; ++i) {
        open[highest_of(best, open, 0, options.num_groups)] = true;
    }
    for (int64_t e = 0; e < routing.num_experts; ++e) {
        taken[e] = !open[e / size];
    }
}

float sigmoid(float x) { return 1.0F / (1.0F + exp_of(-x)); }

void weigh(const Routing& routing, const float* scores, const int32_t* experts, float* weights) {
    const RoutingOptions& options = routing.options;
    const float highest = *std::max_element(scores, scores + routing.num_experts);
    float sum = options.is_sigmoid ? 1e-20F : 0.0F;
    for (int64_t k = 0; k < routing.top_k; ++k) {
        const float score = scores[experts[k]];
        weights[k] = options.is_sigmoid ? sigmoid(score) : exp_of(score - highest);
        sum += weights[k];
    }
    if (!routing.renormalise) {
        sum = options.is_sigmoid ? 1.0F : 0.0F;
        for (int64_t e = 0; e < routing.num_experts && !options.is_sigmoid; ++e) {
            sum += exp_of(scores[e] - highest);
        }
    }
    for (int64_t k = 0; k < routing.top_k; ++k) {
        weights[k] = weights[k] / sum * options.scale;
    }
}

void route_one(const Routing& routing, const float* scores, int32_t* experts, float* weights) {
    const RoutingOptions& options = routing.options;
    float by_bias[kMaxExperts];
    const float* choice = scores;
    if (options.is_sigmoid) {
        for (int64_t e = 0; e < routing.num_experts; ++e) {
            by_bias[e] = sigmoid(scores[e]) + (options.bias == nullptr ? 0.0F : options.bias[e]);
        }
        choice = by_bias;
    }
    bool taken[kMaxExperts] = {};
    if (options.top_groups < options.num_groups) {
        close_groups(routing, choice, taken);
    }
    for (int64_t k = 0; k < routing.top_k; ++k) {
        const int64_t best = highest_of(choice, taken, 0, routing.num_experts);
        taken[best] = true;
        experts[k] = static_cast<int32_t>(best);
    }
    weigh(routing, scores, experts, weights);
}

}  // namespace

float exp_of(float x) { return static_cast<float>(std::exp(static_cast<double>(x))); }

ExpertSlots::ExpertSlots(std::vector<int32_t> experts, int64_t num_experts)
    : experts_(std::move(experts)), starts_(static_cast<size_t>(num_experts) + 1) {
    check(size() <= kMaxSlots, "experts: ", size(), " slots; there may be ", kMaxSlots, " at most");
    for (const int32_t expert : experts_) {
        check(expert >= 0 && expert < num_experts, "experts: a slot has expert ", expert, " of ",
              num_experts);
        ++starts_[static_cast<size_t>(expert) + 1];
    }
    for (size_t e = 1; e < starts_.size(); ++e) {
        check(starts_[e] > 0, "experts: no slot has expert ", e - 1);
        starts_[e] += starts_[e - 1];
    }
    slots_.resize(experts_.size());
    std::vector<int32_t> next = starts_;
    for (size_t slot = 0; slot < experts_.size(); ++slot) {
        slots_[static_cast<size_t>(next[static_cast<size_t>(experts_[slot])]++)] =
            static_cast<int32_t>(slot);
    }
}

ExpertSlots first_slots(int64_t num_slots, int64_t num_experts) {
    std::vector<int32_t> experts(static_cast<size_t>(num_slots));
    for (size_t slot = 0; slot < experts.size(); ++slot) {
        experts[slot] = static_cast<int32_t>(static_cast<int64_t>(slot) % num_experts);
    }
    return {std::move(experts), num_experts};
}

void Pairs::make_room(int64_t num_pairs, int64_t num_slots) {
    const auto size = std::max(experts.size(), static_cast<size_t>(num_pairs));
    experts.resize(size);
    weights.resize(size);
    places.resize(size);
    tokens.resize(size);
    factors.resize(size);
    starts.resize(std::max(starts.size(), static_cast<size_t>(num_slots) + 1));
}

void route(const Routing& routing, Pairs& pairs, int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
        route_one(routing, routing.scores + token * routing.num_experts,
                  pairs.experts.data() + token * routing.top_k,
                  pairs.weights.data() + token * routing.top_k);
    }
}

void place(const Routing& routing, const ExpertSlots& slots, Pairs& pairs, int64_t num_tokens) {
    const int64_t num_pairs = num_tokens * routing.top_k;
    int32_t* starts = pairs.starts.data();
    std::fill_n(starts, slots.size() + 1, 0);
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        ++starts[slots.slot_of(pairs.experts[static_cast<size_t>(pair)], pair / routing.top_k) + 1];
    }
    for (int64_t slot = 1; slot <= slots.size(); ++slot) {
        starts[slot] += starts[slot - 1];
    }
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
        const auto index = static_cast<size_t>(pair);
        const int32_t place = starts[slots.slot_of(pairs.experts[index], pair / routing.top_k)]++;
        pairs.places[index] = place;
        pairs.tokens[static_cast<size_t>(place)] = static_cast<int32_t>(pair / routing.top_k);
        if (routing.options.weighs_inputs) {
            pairs.factors[static_cast<size_t>(place)] = pairs.weights[index];
            pairs.weights[index] = 1.0F;
        }
    }
    // Each entry has moved on to the next slot's start: back by one.
    std::copy_backward(starts, starts + slots.size(), starts + slots.size() + 1);
    starts[0] = 0;
}

void combine(const cpu::Matrix& dst, const float* results, const Pairs& pairs, int64_t top_k,
             int64_t begin, int64_t end, int64_t first_token) {
    for (int64_t token = begin; token < end; ++token) {
        auto* to = reinterpret_cast<float*>(dst.row(token));
        std::fill_n(to, dst.cols, 0.0F);
        const int64_t first_pair = (first_token + token) * top_k;
        for (int64_t pair = first_pair; pair < first_pair + top_k; ++pair) {
            const float weight = pairs.weights[static_cast<size_t>(pair)];
            const float* from = results + pairs.places[static_cast<size_t>(pair)] * dst.cols;
            for (int64_t c = 0; c < dst.cols; ++c) {
                to[c] += weight * from[c];
            }
        }
    }
}

}  // namespace octavo

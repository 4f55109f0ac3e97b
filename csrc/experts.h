// Who computes a token in a mixture of experts, and the sum of what they say.
//
// A few numbers beside the products around them: plain loops, the same on every instruction set.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"

namespace octavo {

constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxTopK = 64;

// Rounded from double, so that every library's exp gives the same float.
float exp_of(float x);

// Tokens and their experts: a pair is one of each. `places` and `weights` are by pair, [tokens,
// top_k], highest score first; places count by expert, each one's tokens ascending.
struct Pairs {
    std::vector<int32_t> experts;
    std::vector<float> weights;
    std::vector<int32_t> places;
    std::vector<int32_t> tokens;  // by place
    std::vector<float> factors;   // by place: of the inputs, where they are weighed
    std::vector<int32_t> starts;  // by expert: its first place; then the end

    void make_room(int64_t num_pairs, int64_t num_experts);
};

struct RoutingOptions {
    bool is_sigmoid = false;      // each score by itself, instead of a softmax of all
    const float* bias = nullptr;  // [num_experts]: counts in the choice, not in the weights
    // Experts are chosen from so many of the groups that they form: those whose best score, or best
    // two scores together, are highest.
    int64_t num_groups = 1;
    int64_t top_groups = 1;
    int64_t best_of_group = 1;
    float scale = 1.0F;          // of the weights
    bool weighs_inputs = false;  // an expert's input is multiplied by the weight, not its result
};

struct Routing {
    const float* scores;  // [tokens, num_experts]
    int64_t num_experts;
    int64_t top_k;
    bool renormalise;  // weights are shares among the chosen experts, not among all
    RoutingOptions options = {};
};

// The experts with the highest scores for tokens [begin, end), and their weights.
void route(const Routing& routing, Pairs& pairs, int64_t begin, int64_t end);

// Places for all pairs of so many tokens, once they are routed.
void place(const Routing& routing, Pairs& pairs, int64_t num_tokens);

// dst[token] = the sum of weight * results[place] over the token's pairs, in their order. Where the
// inputs were weighed the weights are one. The first token of dst is that number among the pairs'.
void combine(const cpu::Matrix& dst, const float* results, const Pairs& pairs, int64_t top_k,
             int64_t begin, int64_t end, int64_t first_token = 0);

}  // namespace octavo

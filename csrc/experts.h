// Who computes a token in a mixture of experts, and the sum of what they say.
//
// A few numbers beside the products around them: plain loops, the same on every instruction set.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/kernels.h"

namespace octavo {

constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxSlots = 4 * kMaxExperts;
constexpr int64_t kMaxTopK = 64;

// Rounded from double, so that every library's exp gives the same float.
float exp_of(float x);

// Where experts are. Each slot has one, and a rank has some slots in a row. An expert may be in
// several slots, which then share its tokens.
class ExpertSlots {
  public:
    ExpertSlots() = default;
    // By slot its expert. Throws ValueError where an expert has none.
    ExpertSlots(std::vector<int32_t> experts, int64_t num_experts);

    int64_t size() const { return static_cast<int64_t>(experts_.size()); }
    int64_t num_experts() const { return static_cast<int64_t>(starts_.size()) - 1; }
    int32_t expert_in(size_t slot) const { return experts_[slot]; }
    // The slot that computes a token's row for the expert.
    int32_t slot_of(int32_t expert, int64_t token) const {
        const int32_t first = starts_[static_cast<size_t>(expert)];
        const int32_t count = starts_[static_cast<size_t>(expert) + 1] - first;
        return slots_[static_cast<size_t>(first + (count == 1 ? 0 : token % count))];
    }

  private:
    std::vector<int32_t> experts_;  // by slot
    std::vector<int32_t> starts_;   // by expert: its first one among `slots_`; then the end
    std::vector<int32_t> slots_;    // of each expert, ascending
};

// At first: the experts in their order, and then the first of them again.
ExpertSlots first_slots(int64_t num_slots, int64_t num_experts);

// Tokens and their experts: a pair is one of each. `places` and `weights` are by pair, [tokens,
// top_k], highest score first; places count by slot, each one's tokens ascending.
struct Pairs {
    std::vector<int32_t> experts;
    std::vector<float> weights;
    std::vector<int32_t> places;
    std::vector<int32_t> tokens;  // by place
    std::vector<float> factors;   // by place: of the inputs, where they are weighed
    std::vector<int32_t> starts;  // by slot: its first place; then the end

    void make_room(int64_t num_pairs, int64_t num_slots);
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
void place(const Routing& routing, const ExpertSlots& slots, Pairs& pairs, int64_t num_tokens);

// dst[token] = the sum of weight * results[place] over the token's pairs, in their order. Where the
// inputs were weighed the weights are one. The first token of dst is that number among the pairs'.
void combine(const cpu::Matrix& dst, const float* results, const Pairs& pairs, int64_t top_k,
             int64_t begin, int64_t end, int64_t first_token = 0);

}  // namespace octavo

// A row's survivors of min-p, top-k and top-p, and the draw. See sampling.h for the rules.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cpu/kernels.h"

namespace octavo {

struct LogitRow {
    const cpu::Kernels& kernels;
    const float* x;
    int64_t count;

    int64_t num_blocks() const { return (count + cpu::kLogitBlock - 1) / cpu::kLogitBlock; }
};

// The greatest of each block of a row, so that later passes can leave most blocks alone.
class RowMaxima {
  public:
    // Returns false if a value is NaN or +inf.
    bool scan(const LogitRow& row);

    float max() const { return max_; }
    float of_block(int64_t block) const { return blocks_[static_cast<size_t>(block)]; }
    int64_t argmax(const LogitRow& row) const;

  private:
    std::vector<float> blocks_;
    float max_ = 0;
};

struct Filter {
    float temperature, min_p, top_p;
    int32_t top_k;  // 0: all

    bool keeps_all() const { return !(min_p > 0) && !(top_p < 1) && top_k <= 0; }
};

class Drawer {
  public:
    struct Candidate {
        uint64_t key;  // descending: x descending, then id ascending; no two are equal
        uint64_t weight;

        int64_t id() const { return static_cast<int64_t>(~key & 0xffffffffu); }
    };

    // One token by 64 random bits. `maxima` are of the row as it is now; their max is finite.
    int64_t draw(const LogitRow& row, const RowMaxima& maxima, const Filter& filter,
                 uint64_t random);

    // log of the sum of exp(x - max).
    double log_total(const LogitRow& row, float max);

  private:
    uint64_t total_weight(const LogitRow& row, float max, float scale);
    int64_t draw_any(const LogitRow& row, float max, float scale, uint64_t random);
    void gather(const LogitRow& row, const RowMaxima& maxima, float scale, float least);
    static uint64_t key_at_weight(std::span<Candidate> part, uint64_t need);

    std::vector<uint64_t> block_weights_;
    std::vector<Candidate> candidates_;  // by ascending id
    std::vector<Candidate> ranked_;      // the same, being put in order
};

}  // namespace octavo

#include "cpu/draw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

#include "cpu/softmax_weights.h"

namespace octavo {
namespace {

using Candidate = Drawer::Candidate;

// Below this exp(t) is less than half a unit of weight.
constexpr float kLeast = -32.0f;

// x as a number whose order is that of x; both zeros are one.
inline uint32_t ordered(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

bool before(const Candidate& a, const Candidate& b) { return a.key > b.key; }

uint64_t sum(std::span<const Candidate> part) {
    uint64_t total = 0;
    for (const Candidate& c : part) total += c.weight;
    return total;
}

// The weight that the tokens kept by top-p must reach.
uint64_t share(float top_p, uint64_t total) {
    const double exact = static_cast<double>(top_p) * static_cast<double>(total);
    return std::clamp(static_cast<uint64_t>(std::ceil(exact)), uint64_t{1}, total);
}

// The upper half of a 128-bit product: a number below `range`, evenly by `random`.
inline uint64_t scale_to(uint64_t random, uint64_t range) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<uint64_t>(static_cast<Wide>(random) * range >> 64);
}

}  // namespace

bool RowMaxima::scan(const LogitRow& row) {
    blocks_.resize(static_cast<size_t>(row.num_blocks()));
    const cpu::RowScan scan = row.kernels.scan_row(row.x, row.count, blocks_.data());
    max_ = scan.max;
    return scan.usable;
}

int64_t RowMaxima::argmax(const LogitRow& row) const {
    const auto block = std::find(blocks_.begin(), blocks_.end(), max_) - blocks_.begin();
    return std::find(row.x + block * cpu::kLogitBlock, row.x + row.count, max_) - row.x;
}

int64_t Drawer::draw(const LogitRow& row, const RowMaxima& maxima, const Filter& filter,
                     uint64_t random) {
    const float max = maxima.max();
    const float scale = 1.0f / filter.temperature;
    if (filter.keeps_all()) return draw_any(row, max, scale, random);

    float least = kLeast;
    if (filter.min_p > 0) {
        least = std::max(least, static_cast<float>(std::log(static_cast<double>(filter.min_p))));
    }
    // With top-p alone the weight to reach is known before anything is ranked.
    const bool only_top_p = filter.top_k <= 0 && !(filter.min_p > 0);
    uint64_t need = only_top_p ? share(filter.top_p, total_weight(row, max, scale)) : 0;

    // Most often the likeliest few are enough; look further down only as far as needed.
    for (const float level : {-4.0f, -8.0f, -12.0f, kLeast}) {
        const float threshold = std::max(level, least);
        gather(row, maxima, scale, threshold);
        if (threshold == least) break;
        if (only_top_p && sum(candidates_) >= need) break;
        if (filter.top_k > 0 && std::ssize(candidates_) >= filter.top_k) break;
    }

    ranked_ = candidates_;
    uint64_t last_key = 0;
    if (filter.top_k > 0 && std::ssize(ranked_) > filter.top_k) {
        const auto last = ranked_.begin() + filter.top_k - 1;
        std::nth_element(ranked_.begin(), last, ranked_.end(), before);
        last_key = last->key;
        ranked_.resize(static_cast<size_t>(filter.top_k));
    }
    if (filter.top_p < 1) {
        if (!only_top_p) need = share(filter.top_p, sum(ranked_));
        last_key = key_at_weight(ranked_, need);
    }
    std::erase_if(candidates_, [&](const Candidate& c) { return c.key < last_key; });
    uint64_t point = scale_to(random, sum(candidates_));
    for (const Candidate& c : candidates_) {
        if (point < c.weight) return c.id();
        point -= c.weight;
    }
    return maxima.argmax(row);  // not reached: the point is below the sum
}

double Drawer::log_total(const LogitRow& row, float max) {
    return std::log(static_cast<double>(total_weight(row, max, 1.0f)) * 0x1.0p-42);
}

// Also fills block_weights_.
uint64_t Drawer::total_weight(const LogitRow& row, float max, float scale) {
    block_weights_.resize(static_cast<size_t>(row.num_blocks()));
    return row.kernels.sum_softmax_weights(row.x, row.count, max, scale, block_weights_.data());
}

int64_t Drawer::draw_any(const LogitRow& row, float max, float scale, uint64_t random) {
    uint64_t point = scale_to(random, total_weight(row, max, scale));
    size_t block = 0;
    while (point >= block_weights_[block]) point -= block_weights_[block++];
    for (int64_t i = static_cast<int64_t>(block) * cpu::kLogitBlock;; ++i) {
        const uint64_t weight = cpu::softmax_weight(row.x[i], max, scale);
        if (point < weight) return i;
        point -= weight;
    }
}

// Candidates are the tokens whose scaled logit is at least `least`.
void Drawer::gather(const LogitRow& row, const RowMaxima& maxima, float scale, float least) {
    const float max = maxima.max();
    candidates_.clear();
    for (int64_t block = 0; block < row.num_blocks(); ++block) {
        if ((maxima.of_block(block) - max) * scale < least) continue;
        const int64_t start = block * cpu::kLogitBlock;
        const int64_t end = std::min(start + cpu::kLogitBlock, row.count);
        for (int64_t i = start; i < end; ++i) {
            const float x = row.x[i];
            if ((x - max) * scale < least) continue;
            const uint64_t key = static_cast<uint64_t>(ordered(x)) << 32 |
                                 static_cast<uint32_t>(~static_cast<uint32_t>(i));
            candidates_.push_back({key, cpu::softmax_weight(x, max, scale)});
        }
    }
}

// The key at which weights in descending order of keys reach `need`. Only the side of each pivot
// that holds it is looked at again, so most of the list is never put in order.
uint64_t Drawer::key_at_weight(std::span<Candidate> part, uint64_t need) {
    while (part.size() > 32) {
        uint64_t a = part.front().key, b = part[part.size() / 2].key, c = part.back().key;
        const uint64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
        const auto middle = std::partition(part.begin(), part.end(),
                                           [&](const Candidate& x) { return x.key >= pivot; });
        const auto head = part.first(static_cast<size_t>(middle - part.begin()));
        const uint64_t weight = sum(head);
        if (weight >= need) {
            part = head;
        } else {
            need -= weight;
            part = part.subspan(head.size());
        }
    }
    std::sort(part.begin(), part.end(), before);
    for (const Candidate& c : part) {
        if (need <= c.weight) return c.key;
        need -= c.weight;
    }
    return 0;
}

}  // namespace octavo

#include "cpu/sampling.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "common/team.h"
#include "cpu/draw.h"
#include "cpu/philox.h"

namespace octavo {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kGreedyBelow = 1e-5f;
constexpr int kMostInserted = 64;  // alternatives; a longer list is cheaper to sort

// What is banned stays banned; nothing grows to infinity.
inline float bounded(float was, float now) {
    if (was == -kInfinity) return was;
    return now <= kLargest ? now : kLargest;
}

struct RaggedRow {
    std::span<const int32_t> ids;
    const float* values;
};

RaggedRow row_of(const RaggedView& lists, int64_t s) {
    if (lists.starts == nullptr) return {};
    const auto first = static_cast<size_t>(lists.starts[s]);
    const auto end = static_cast<size_t>(lists.starts[s + 1]);
    return {{lists.ids + first, end - first},
            lists.values == nullptr ? nullptr : lists.values + first};
}

// A worker's memory.
struct Scratch {
    struct Seen {
        uint32_t mark;
        int32_t num_outputs;
    };

    RowMaxima maxima;
    Drawer drawer;
    std::vector<float> raw;       // the row as it came, where it is needed after it was changed
    std::vector<float> kept;      // logits of allowed tokens
    std::vector<Seen> seen;       // by token; valid where the mark is the present one
    std::vector<int32_t> order;   // tokens seen, each once
    std::vector<int32_t> ranked;  // all tokens, the likely ones in front
    uint32_t mark = 0;

    void forget_seen(int64_t vocab) {
        if (++mark == 0 || seen.size() < static_cast<size_t>(vocab)) {
            seen.assign(static_cast<size_t>(vocab), {});
            mark = 1;
        }
        order.clear();
    }
};

// Works on one row after another.
class RowSampler {
  public:
    RowSampler(const SampleArgs& args, const cpu::Kernels& kernels, Scratch& scratch)
        : args_(args),
          kernels_(kernels),
          scratch_(scratch),
          maxima_(scratch.maxima),
          drawer_(scratch.drawer) {}

    void sample(int64_t s);

  private:
    void fail(int64_t s, SampleStatus status);
    bool wants_adjustment(int64_t s) const;
    void adjust(int64_t s, float* x);
    void allow_only(std::span<const int32_t> ids, float* x);
    void mask(const uint32_t* bits, float* x);
    const uint32_t* mask_of(int64_t s) const;
    void penalise(int64_t s, float* x);
    void rank_top(int64_t s, const float* x);
    int take_chosen(std::span<const int32_t> chosen, const float* x, int32_t* ids,
                    float* values) const;
    int insert_top(const float* x, int wanted, int32_t* ids, float* values) const;
    int sort_top(const float* x, int wanted, int32_t* ids, float* values);
    void score(int64_t s, const float* x, int32_t token);

    bool in_vocab(int32_t id) const { return id >= 0 && id < args_.vocab; }
    const SamplingRow& row(int64_t s) const { return args_.table[args_.rows[s]]; }

    const SampleArgs& args_;
    const cpu::Kernels& kernels_;
    Scratch& scratch_;
    RowMaxima& maxima_;
    Drawer& drawer_;
    float raw_max_ = 0;
    double raw_log_total_ = 0;
};

void RowSampler::sample(int64_t s) {
    float* x = args_.logits + s * args_.vocab;
    const LogitRow logits = {kernels_, x, args_.vocab};
    if (!maxima_.scan(logits)) return fail(s, SampleStatus::NotFinite);
    if (maxima_.max() == -kInfinity) return fail(s, SampleStatus::NothingAllowed);

    const bool is_scored = args_.targets[s] >= 0;
    const bool is_adjusted = !is_scored && wants_adjustment(s);
    const float* raw = x;
    if (args_.num_logprobs >= 0) {
        raw_max_ = maxima_.max();
        raw_log_total_ = drawer_.log_total(logits, raw_max_);
        rank_top(s, x);
        if (is_adjusted) {
            scratch_.raw.assign(x, x + args_.vocab);
            raw = scratch_.raw.data();
        }
    }

    int64_t token = args_.targets[s];
    if (!is_scored) {
        if (is_adjusted) {
            adjust(s, x);
            maxima_.scan(logits);
            if (maxima_.max() == -kInfinity) return fail(s, SampleStatus::NothingAllowed);
        }
        const SamplingRow& p = row(s);
        if (p.temperature < kGreedyBelow) {
            token = maxima_.argmax(logits);
        } else {
            const Filter filter = {p.temperature, p.min_p, p.top_p, p.top_k};
            const auto position = static_cast<uint64_t>(args_.positions[s]);
            token = drawer_.draw(logits, maxima_, filter, philox_u64(p.seed, position));
        }
    }
    args_.tokens[s] = static_cast<int32_t>(token);
    args_.status[s] = static_cast<uint8_t>(SampleStatus::Ok);
    if (args_.num_logprobs >= 0) score(s, raw, args_.tokens[s]);
}

void RowSampler::fail(int64_t s, SampleStatus status) {
    args_.tokens[s] = -1;
    args_.status[s] = static_cast<uint8_t>(status);
    if (args_.num_logprobs < 0) return;
    args_.logprobs[s] = std::numeric_limits<float>::quiet_NaN();
    args_.ranks[s] = 0;
    std::fill_n(args_.top_ids + s * args_.num_logprobs, args_.num_logprobs, -1);
    std::fill_n(args_.top_logprobs + s * args_.num_logprobs, args_.num_logprobs, -kInfinity);
}

bool RowSampler::wants_adjustment(int64_t s) const {
    const SamplingRow& p = row(s);
    return p.repetition_penalty != 1.0f || p.frequency_penalty != 0.0f ||
           p.presence_penalty != 0.0f || !row_of(args_.bias, s).ids.empty() ||
           !row_of(args_.allowed, s).ids.empty() || mask_of(s) != nullptr;
}

const uint32_t* RowSampler::mask_of(int64_t s) const {
    const MaskView& masks = args_.masks;
    if (masks.rows == nullptr || masks.rows[s] < 0) return nullptr;
    return masks.bits + masks.rows[s] * masks.num_words;
}

void RowSampler::adjust(int64_t s, float* x) {
    const RaggedRow allowed = row_of(args_.allowed, s);
    if (!allowed.ids.empty()) allow_only(allowed.ids, x);
    if (const uint32_t* bits = mask_of(s); bits != nullptr) mask(bits, x);
    const RaggedRow bias = row_of(args_.bias, s);
    for (size_t i = 0; i < bias.ids.size(); ++i) {
        if (!in_vocab(bias.ids[i])) continue;
        float& logit = x[bias.ids[i]];
        logit = bounded(logit, logit + bias.values[i]);
    }
    penalise(s, x);
}

void RowSampler::allow_only(std::span<const int32_t> ids, float* x) {
    scratch_.kept.clear();
    for (const int32_t id : ids) scratch_.kept.push_back(in_vocab(id) ? x[id] : 0.0f);
    std::fill_n(x, args_.vocab, -kInfinity);
    for (size_t i = 0; i < ids.size(); ++i) {
        if (in_vocab(ids[i])) x[ids[i]] = scratch_.kept[i];
    }
}

void RowSampler::mask(const uint32_t* bits, float* x) {
    const int64_t end = std::min(args_.vocab, args_.masks.num_words * 32);
    for (int64_t first = 0; first < end; first += 32) {
        uint32_t banned = ~bits[first / 32];
        if (end - first < 32) banned &= (uint32_t{1} << (end - first)) - 1;
        if (banned == ~uint32_t{0}) {  // most words, mostly
            std::fill_n(x + first, 32, -kInfinity);
            continue;
        }
        for (; banned != 0; banned &= banned - 1) x[first + std::countr_zero(banned)] = -kInfinity;
    }
    std::fill(x + end, x + args_.vocab, -kInfinity);
}

void RowSampler::penalise(int64_t s, float* x) {
    const SamplingRow& p = row(s);
    if (p.repetition_penalty == 1.0f && p.frequency_penalty == 0.0f && p.presence_penalty == 0.0f) {
        return;
    }
    scratch_.forget_seen(args_.vocab);
    const int32_t* history = args_.history + args_.rows[s] * args_.history_stride;
    for (int32_t i = 0; i < args_.positions[s]; ++i) {
        if (!in_vocab(history[i])) continue;
        Scratch::Seen& seen = scratch_.seen[static_cast<size_t>(history[i])];
        if (seen.mark != scratch_.mark) {
            seen = {scratch_.mark, 0};
            scratch_.order.push_back(history[i]);
        }
        if (i >= p.num_prompt_tokens) ++seen.num_outputs;
    }
    for (const int32_t token : scratch_.order) {
        float y = x[token];
        if (p.repetition_penalty != 1.0f) {
            y = y > 0.0f ? y / p.repetition_penalty : y * p.repetition_penalty;
        }
        if (const int32_t count = scratch_.seen[static_cast<size_t>(token)].num_outputs;
            count > 0) {
            y = y - p.frequency_penalty * static_cast<float>(count);
            y = y - p.presence_penalty;
        }
        x[token] = bounded(x[token], y);
    }
}

// The tokens requested, or the most likely ones: a few by insertion into a list that is already in
// order, many by sorting.
void RowSampler::rank_top(int64_t s, const float* x) {
    const int wanted = args_.num_logprobs;
    int32_t* ids = args_.top_ids + s * wanted;
    float* values = args_.top_logprobs + s * wanted;
    const std::span<const int32_t> chosen = row_of(args_.chosen, s).ids;
    const int found = !chosen.empty()          ? take_chosen(chosen, x, ids, values)
                      : wanted > kMostInserted ? sort_top(x, wanted, ids, values)
                                               : insert_top(x, wanted, ids, values);
    for (int k = 0; k < found; ++k) {
        values[k] = static_cast<float>(static_cast<double>(values[k] - raw_max_) - raw_log_total_);
    }
    std::fill(ids + found, ids + wanted, -1);
    std::fill(values + found, values + wanted, -kInfinity);
}

int RowSampler::take_chosen(std::span<const int32_t> chosen, const float* x, int32_t* ids,
                            float* values) const {
    for (size_t k = 0; k < chosen.size(); ++k) {
        ids[k] = chosen[k];
        values[k] = in_vocab(chosen[k]) ? x[chosen[k]] : -kInfinity;
    }
    return static_cast<int>(chosen.size());
}

int RowSampler::sort_top(const float* x, int wanted, int32_t* ids, float* values) {
    const auto found = static_cast<int>(std::min<int64_t>(wanted, args_.vocab));
    auto& order = scratch_.ranked;
    order.resize(static_cast<size_t>(args_.vocab));
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + found, order.end(),
                      [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
    for (int k = 0; k < found; ++k) {
        ids[k] = order[static_cast<size_t>(k)];
        values[k] = x[ids[k]];
    }
    return found;
}

int RowSampler::insert_top(const float* x, int wanted, int32_t* ids, float* values) const {
    int found = 0;
    for (int64_t i = 0; i < args_.vocab && wanted > 0; ++i) {
        if (found == wanted) {
            // Ids ascend, so an equal one comes too late.
            if (i % cpu::kLogitBlock == 0 &&
                maxima_.of_block(i / cpu::kLogitBlock) <= values[found - 1]) {
                i += cpu::kLogitBlock - 1;
                continue;
            }
            if (x[i] <= values[found - 1]) continue;
            --found;
        }
        int place = found++;
        for (; place > 0 && values[place - 1] < x[i]; --place) {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
        }
        values[place] = x[i];
        ids[place] = static_cast<int32_t>(i);
    }
    return found;
}

void RowSampler::score(int64_t s, const float* x, int32_t token) {
    const float logit = x[token];
    int32_t num_greater = 0;
    for (int64_t i = 0; i < args_.vocab; ++i) num_greater += x[i] > logit ? 1 : 0;
    args_.ranks[s] = 1 + num_greater;
    args_.logprobs[s] = static_cast<float>(static_cast<double>(logit - raw_max_) - raw_log_total_);
}

}  // namespace

void sample(Team& team, const SampleArgs& args) {
    std::atomic<int64_t> next{0};
    auto work = [&](int) {
        thread_local Scratch scratch;  // kept from step to step
        RowSampler sampler(args, team.kernels(), scratch);
        for (int64_t s = next++; s < args.num_rows; s = next++) sampler.sample(s);
    };
    if (args.num_rows > 1) {
        team.run(work);
    } else {
        work(0);  // nothing to share: do not wake anyone
    }
}

}  // namespace octavo

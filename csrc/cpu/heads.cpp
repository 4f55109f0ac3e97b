#include "cpu/heads.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "cpu/fp8.h"
#include "cpu/norm.h"

namespace octavo::cpu::OCTAVO_ISA {
namespace {

// One of the heads that lie side by side in a token's row.
struct Head {
    const float* row;
    int64_t count;
    int64_t index;
    const float* weights;  // of the norm; null: none

    const float* values(int64_t dim) const { return row + index * dim; }
    const float* weight(const AttentionArgs& args) const {
        return args.norm_by_head ? weights + index * args.kv.head_dim : weights;
    }
};

void norm_head(const AttentionArgs& args, const Head& head, const float* from, float* to) {
    const int64_t dim = args.kv.head_dim;
    const float* weight = head.weight(args);
    if (args.norm == HeadNorm::Layer) {
        const Moments m = moments(from, dim, args.norm_eps);
        for (int64_t i = 0; i < dim; i += kLanes) {
            const Vec distance = load(from + i) - broadcast(m.mean);
            store(to + i, distance * broadcast(m.factor) * load(weight + i));
        }
        return;
    }
    const bool is_row = args.norm == HeadNorm::Row;
    const Vec factor = broadcast(is_row ? inverse_rms(head.row, head.count * dim, args.norm_eps)
                                        : inverse_rms(from, dim, args.norm_eps));
    for (int64_t i = 0; i < dim; i += kLanes) {
        store(to + i, load(from + i) * factor * load(weight + i));
    }
}

// The cosines and sines that a token's heads turn by.
class Angles {
  public:
    explicit Angles(const AttentionArgs& args)
        : args_(args),
          has_axes_(args.rope_positions != nullptr &&
                    args.rope_sections != std::array<int64_t, kRopeAxes>{}) {}

    const float* of(int64_t token) {
        if (!has_axes_) {
            return row(args_.positions[token]);
        }
        if (token != token_) {
            gather(token);
            token_ = token;
        }
        return mixed_;
    }

  private:
    const float* row(int64_t position) const { return args_.cos_sin + position * args_.rotary_dim; }

    void gather(int64_t token) {
        const int64_t half = args_.rotary_dim / 2;
        if (args_.rope_interleaved) {
            gather_in_turn(token, half);
            return;
        }
        int64_t first = 0;
        for (int64_t axis = 0; axis < kRopeAxes; ++axis) {
            const int64_t count = args_.rope_sections[static_cast<size_t>(axis)];
            const float* from = row(args_.rope_positions[axis * args_.num_tokens + token]) + first;
            std::copy_n(from, count, mixed_ + first);
            std::copy_n(from + half, count, mixed_ + half + first);
            first += count;
        }
    }

    void gather_in_turn(int64_t token, int64_t half) {
        std::copy_n(row(args_.rope_positions[token]), 2 * half, mixed_);
        for (int64_t axis = 1; axis < kRopeAxes; ++axis) {
            const float* from = row(args_.rope_positions[axis * args_.num_tokens + token]);
            const int64_t end = kRopeAxes * args_.rope_sections[static_cast<size_t>(axis)];
            for (int64_t i = axis; i < end; i += kRopeAxes) {
                mixed_[i] = from[i];
                mixed_[half + i] = from[half + i];
            }
        }
    }

    const AttentionArgs& args_;
    bool has_axes_;
    int64_t token_ = -1;
    float mixed_[kMaxHeadDim] = {};
};

// Pairs (i, i + rotary_dim / 2).
void rotate(const AttentionArgs& args, const float* cos, float* to) {
    const int64_t half = args.rotary_dim / 2;
    const float* sin = cos + half;
    for (int64_t i = 0; i < half; i += kLanes) {
        const int64_t n = half - i;
        const Vec c = load_some(cos + i, n);
        const Vec s = load_some(sin + i, n);
        const Vec x = load_some(to + i, n);
        const Vec y = load_some(to + half + i, n);
        store_some(to + i, x * c - y * s, n);
        store_some(to + half + i, y * c + x * s, n);
    }
}

// to = the head, normed if there is a weight, and rotated.
void norm_and_rotate(const AttentionArgs& args, const Head& head, const float* angles, float* to) {
    const int64_t dim = args.kv.head_dim;
    const float* from = head.values(dim);
    if (head.weights == nullptr || args.norm_after_rope) {
        for (int64_t i = 0; i < dim; i += kLanes) {
            store(to + i, load(from + i));
        }
    } else {
        norm_head(args, head, from, to);
    }
    rotate(args, angles, to);
    if (head.weights != nullptr && args.norm_after_rope) {
        norm_head(args, head, to, to);
    }
}

struct Keys {
    static std::byte* panels(const KVLayer& kv, int64_t block, int64_t head) {
        return kv.keys(block, head);
    }
    static uint16_t* scales(const KVLayer& kv, int64_t block, int64_t head) {
        return kv.key_scales(block, head);
    }
    // Words of 4 bytes hold neighbours of one token, whatever the format.
    template <class T>
    static void scatter(const T* row, int64_t dim, int64_t token, T* to) {
        constexpr int64_t n = 4 / sizeof(T);
        for (int64_t d = 0; d < dim; d += n) {
            std::memcpy(to + key_index(sizeof(T), token, d), row + d, 4);
        }
    }
};

struct Values {
    static std::byte* panels(const KVLayer& kv, int64_t block, int64_t head) {
        return kv.values(block, head);
    }
    static uint16_t* scales(const KVLayer& kv, int64_t block, int64_t head) {
        return kv.value_scales(block, head);
    }
    template <class T>
    static void scatter(const T* row, int64_t dim, int64_t token, T* to) {
        constexpr int64_t n = 4 / sizeof(T);
        for (int64_t first = 0; first < dim; first += kBlockTokens) {
            T* panel = to + value_index(sizeof(T), token, first);
            for (int64_t i = 0; i < kBlockTokens; ++i) {
                panel[i * n] = row[first + i];
            }
        }
    }
};

template <class Part, class T>
void scatter(const KVLayer& kv, int64_t slot, int64_t head, const T* row) {
    auto* to = reinterpret_cast<T*>(Part::panels(kv, slot / kBlockTokens, head));
    Part::scatter(row, kv.head_dim, slot % kBlockTokens, to);
}

// Rounded up, so that no number is above the format's largest. A NaN or an infinity in the row
// makes it NaN; rows of next to nothing become zeros.
float scale_of(const float* row, int64_t dim, float largest) {
    Vec magnitude = broadcast(0.0F);
    Vec nothing = broadcast(0.0F);
    for (int64_t i = 0; i < dim; i += kLanes) {
        magnitude = max(abs(load(row + i)), magnitude);
        nothing = nothing + load(row + i) * broadcast(0.0F);
    }
    const float scale = reduce_max(magnitude) / largest + reduce_add(nothing);
    if (scale < 0x1.0p-100F) {
        return 0.0F;
    }
    const uint32_t bits = std::bit_cast<uint32_t>(scale);
    return scale == scale ? std::bit_cast<float>((bits + 0xffffU) & 0xffff0000U) : scale;
}

template <class Part>
void write_bf16(const KVLayer& kv, int64_t slot, int64_t head, const float* row) {
    uint16_t narrowed[kMaxHeadDim];
    for (int64_t d = 0; d < kv.head_dim; d += kLanes) {
        store_bf16(narrowed + d, load(row + d));
    }
    scatter<Part>(kv, slot, head, narrowed);
}

template <class Part, class Narrow>
void write_scaled(const KVLayer& kv, int64_t slot, int64_t head, const float* row, float largest,
                  Narrow narrow) {
    const float scale = scale_of(row, kv.head_dim, largest);
    const float factor = scale == 0.0F ? 0.0F : 1.0F / scale;
    Part::scales(kv, slot / kBlockTokens, head)[slot % kBlockTokens] = float_to_bf16(scale);
    uint8_t narrowed[kMaxHeadDim];
    for (int64_t d = 0; d < kv.head_dim; ++d) {
        narrowed[d] = narrow(row[d] * factor);
    }
    scatter<Part>(kv, slot, head, narrowed);
}

template <class Part>
void write(const KVLayer& kv, int64_t slot, int64_t head, const float* row) {
    switch (kv.format) {
        case KVFormat::F32:
            scatter<Part>(kv, slot, head, row);
            break;
        case KVFormat::BF16:
            write_bf16<Part>(kv, slot, head, row);
            break;
        case KVFormat::Int8:
            write_scaled<Part>(
                kv, slot, head, row, 127.0F,
                [](float value) {  // the addition rounds to the nearest whole number, ties to even
                    return static_cast<uint8_t>(std::bit_cast<uint32_t>(value + 0x1.8p23F));
                });
            break;
        case KVFormat::E4M3:
            write_scaled<Part>(kv, slot, head, row, E4M3::kLargest,
                               [](float value) { return E4M3::narrow(value); });
            break;
        case KVFormat::E5M2:
            write_scaled<Part>(kv, slot, head, row, E5M2::kLargest,
                               [](float value) { return E5M2::narrow(value); });
            break;
    }
}

}  // namespace

void prepare_heads(const AttentionArgs& args, int64_t begin, int64_t end) {
    const int64_t dim = args.kv.head_dim;
    const int64_t num_heads = args.num_heads;
    const HeadRange& all = args.heads;
    Angles angles(args);
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t token = unit / args.head_units();
        const int64_t index = unit % args.head_units();
        const auto* qkv = reinterpret_cast<const float*>(args.qkv.row(token));
        const int64_t position = args.positions[token];
        if (index < num_heads) {
            float* q = args.q + (token * num_heads + index) * dim;
            norm_and_rotate(args, {qkv, all.num_heads, all.first_head + index, args.q_norm},
                            angles.of(token), q);
            if (args.query_scales != nullptr) {
                const Vec scale = broadcast(args.query_scales[position]);
                for (int64_t i = 0; i < dim; i += kLanes) {
                    store(q + i, load(q + i) * scale);
                }
            }
            continue;
        }
        const int64_t head = index - num_heads;
        const float* keys = qkv + all.num_heads * dim;
        const int64_t in_row = all.first_kv_head + head;
        const float* v = keys + (all.num_kv_heads + in_row) * dim;
        float rotated[kMaxHeadDim];
        norm_and_rotate(args, {keys, all.num_kv_heads, in_row, args.k_norm}, angles.of(token),
                        rotated);
        write<Keys>(args.kv, args.slots[token], head, rotated);
        write<Values>(args.kv, args.slots[token], head, v);
    }
}

namespace {

// to = a key or query that turns, of which pairs may be neighbours as stored.
void copy_turned(const AttentionArgs& args, const LatentArgs& latent, const float* from,
                 int64_t position, float* to) {
    const int64_t half = latent.rope_dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        to[i] = from[latent.turns_neighbours ? 2 * i : i];
        to[half + i] = from[latent.turns_neighbours ? 2 * i + 1 : half + i];
    }
    rotate(args, args.cos_sin + position * args.rotary_dim, to);
}

void copy_latent(const AttentionArgs& args, const LatentArgs& latent, int64_t token) {
    const int64_t rank = args.kv.latent_rank;
    const auto* from = reinterpret_cast<const float*>(latent.kv.row(token));
    float key[kMaxHeadDim];
    const Vec factor = broadcast(inverse_rms(from, rank, args.norm_eps));
    for (int64_t i = 0; i < rank; i += kLanes) {
        store(key + i, load(from + i) * factor * load(latent.kv_norm + i));
    }
    copy_turned(args, latent, from + rank, args.positions[token], key + rank);
    write<Keys>(args.kv, args.slots[token], 0, key);
}

}  // namespace

void prepare_latents(const AttentionArgs& args, const LatentArgs& latent, int64_t begin,
                     int64_t end) {
    const int64_t num_units = args.num_heads + 1;
    const int64_t nope_dim = latent.nope_dim(args.heads.num_heads);
    const int64_t head_dim = nope_dim + latent.rope_dim;
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t token = unit / num_units;
        const int64_t head = unit % num_units;
        if (head == args.num_heads) {
            copy_latent(args, latent, token);
            continue;
        }
        const auto* from = reinterpret_cast<const float*>(latent.q.row(token)) +
                           (args.heads.first_head + head) * head_dim;
        std::byte* row = latent.nope.row(token);
        for (int64_t i = 0; i < nope_dim; i += kLanes) {
            const int64_t place = (args.heads.first_head + head) * nope_dim + i;
            const int64_t count = nope_dim - i;
            const Vec values = load_some(from + i, count);
            latent.nope.dtype == Dtype::F32
                ? store_some(reinterpret_cast<float*>(row) + place, values, count)
                : store_some(reinterpret_cast<uint16_t*>(row) + place, values, count);
        }
        float* q = args.q + (token * args.num_heads + head) * args.kv.head_dim;
        copy_turned(args, latent, from + nope_dim, args.positions[token], q + args.kv.latent_rank);
    }
}

}  // namespace octavo::cpu::OCTAVO_ISA

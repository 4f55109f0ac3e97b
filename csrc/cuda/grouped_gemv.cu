// A warp for each output. Each lane takes sixteen bytes of the weight's row at a time, so that a
// warp reads half a kilobyte in one piece; the lanes' sums are added as a tree.
//
// The same source compiles for the host, where blocks, warps and lanes are loops: what a lane
// computes, and the order in which lanes are added, is one code.

#include "grouped_gemv.h"

#include <cmath>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define BOTH __host__ __device__ __forceinline__
#else
#define BOTH inline
#endif

namespace octavo {
namespace {

constexpr int LANES = 32;
constexpr int WARPS = 4;    // of a block
constexpr int BYTES = 16;   // that a lane reads at a time
constexpr int VALUES = 16;  // columns that are multiplied together; no group has fewer

struct Half {
    uint16_t bits;
};
struct BFloat {
    uint16_t bits;
};

BOTH float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
#endif
}

BOTH uint32_t bits_of(float value) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(value);
#else
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
#endif
}

BOTH float widen(float value) { return value; }

BOTH float widen(BFloat value) { return float_of(uint32_t{value.bits} << 16); }

BOTH float widen(Half value) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(value.bits));
#else
    // The exponent is moved up by a product, which also makes subnormals right.
    const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
    const uint32_t rest = value.bits & 0x7FFFu;
    if (rest >= 0x7C00u) return float_of(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
    return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
#endif
}

BOTH void narrow(float value, float& out) { out = value; }

BOTH void narrow(float value, BFloat& out) {
    const uint32_t bits = bits_of(value);
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    const uint32_t rounded = bits + 0x7FFFu + (bits >> 16 & 1u);  // to nearest, ties to even
    out.bits = static_cast<uint16_t>(is_nan ? bits >> 16 | 0x40u : rounded >> 16);
}

BOTH void narrow(float value, Half& out) {
#ifdef __CUDA_ARCH__
    out.bits = __half_as_ushort(__float2half_rn(value));
#else
    const _Float16 half = static_cast<_Float16>(value);
    std::memcpy(&out.bits, &half, sizeof(half));
#endif
}

// What one load brings.
template <typename T>
struct alignas(16) Piece {
    T values[16 / sizeof(T)];
};

// q + 2^23 as a float's bits: the way from an integer to a float that needs no conversion unit.
BOTH float small_number(uint32_t q) { return float_of(0x4B000000u | q) - 8388608.0f; }

// The sixteen integers of a lane's bytes: of 4 bits either the low or the high ones.
template <int BITS>
BOTH float integer_at(const Piece<uint32_t>& bytes, int place, int shift, float offset) {
    const uint32_t byte = bytes.values[place / 4] >> (8 * (place % 4)) & 0xFFu;
    if constexpr (BITS == 4) return small_number(byte >> shift & 15u) - offset;
    return small_number(byte ^ 0x80u) - 128.0f;  // signed
}

template <typename T, int BITS, int ROWS>
struct Product {
    GroupedGemv work;

    // Adds the products of sixteen columns from `column` on, all of one group.
    BOTH void add(int output, int column, const Piece<uint32_t>& bytes, int shift,
                  float (&sums)[ROWS]) const {
        const int64_t group = static_cast<int64_t>(output) * (work.num_inputs / work.group_size) +
                              column / work.group_size;
        const float scale = widen(Half{work.scales[group]});
        const float minimum = work.minima == nullptr ? 0.0f : widen(Half{work.minima[group]});
        const float offset = work.minima == nullptr ? 8.0f : 0.0f;
        float q[VALUES];
        for (int i = 0; i < VALUES; ++i) q[i] = integer_at<BITS>(bytes, i, shift, offset);
        constexpr int IN_PIECE = 16 / sizeof(T);
        for (int row = 0; row < ROWS; ++row) {
            if (row >= work.num_rows) break;
            const T* x =
                static_cast<const T*>(work.x) + static_cast<int64_t>(row) * work.num_inputs;
            float product = 0.0f, total = 0.0f;
            for (int first = 0; first < VALUES; first += IN_PIECE) {
                const Piece<T> piece = *reinterpret_cast<const Piece<T>*>(x + column + first);
                for (int i = 0; i < IN_PIECE; ++i) {
                    const float value = widen(piece.values[i]);
                    product = fmaf(value, q[first + i], product);
                    total += value;
                }
            }
            sums[row] = fmaf(product, scale, sums[row]);
            if (work.minima != nullptr) sums[row] = fmaf(total, minimum, sums[row]);
        }
    }

    // One lane's part of one output.
    BOTH void lane(int output, int lane, float (&sums)[ROWS]) const {
        for (int row = 0; row < ROWS; ++row) sums[row] = 0.0f;
        const int row_bytes = work.num_inputs * BITS / 8;
        const uint8_t* bytes = work.packed + static_cast<int64_t>(output) * row_bytes;
        for (int at = lane * BYTES; at < row_bytes; at += LANES * BYTES) {
            const auto piece = *reinterpret_cast<const Piece<uint32_t>*>(bytes + at);
            if constexpr (BITS == 4) {
                const int column = at / work.half * 2 * work.half + at % work.half;
                add(output, column, piece, 0, sums);
                add(output, column + work.half, piece, 4, sums);
            } else {
                add(output, at, piece, 0, sums);
            }
        }
    }

    BOTH void store(int output, const float (&sums)[ROWS]) const {
        for (int row = 0; row < ROWS; ++row) {
            if (row >= work.num_rows) break;
            const int64_t at = static_cast<int64_t>(row) * work.num_outputs + output;
            const T* bias = static_cast<const T*>(work.bias);
            const float sum = bias == nullptr ? sums[row] : sums[row] + widen(bias[output]);
            if (work.is_wide)
                static_cast<float*>(work.out)[at] = sum;
            else
                narrow(sum, static_cast<T*>(work.out)[at]);
        }
    }
};

#ifdef __CUDACC__

template <typename T, int BITS, int ROWS>
__global__ void __launch_bounds__(WARPS* LANES) gemv_kernel(Product<T, BITS, ROWS> product) {
    const int output = blockIdx.x * WARPS + threadIdx.x / LANES;
    if (output >= product.work.num_outputs) return;
    float sums[ROWS];
    product.lane(output, threadIdx.x % LANES, sums);
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        for (int row = 0; row < ROWS; ++row)
            sums[row] += __shfl_xor_sync(0xFFFFFFFFu, sums[row], distance);
    if (threadIdx.x % LANES == 0) product.store(output, sums);
}

template <typename T, int BITS, int ROWS>
bool run(const GroupedGemv& work, void* stream) {
    const int num_blocks = (work.num_outputs + WARPS - 1) / WARPS;
    gemv_kernel<<<num_blocks, WARPS * LANES, 0, static_cast<cudaStream_t>(stream)>>>(
        Product<T, BITS, ROWS>{work});
    return cudaGetLastError() == cudaSuccess;
}

#else

template <typename T, int BITS, int ROWS>
bool run(const GroupedGemv& work, void*) {
    const Product<T, BITS, ROWS> product{work};
    for (int output = 0; output < work.num_outputs; ++output) {
        float sums[LANES][ROWS], before[LANES][ROWS];
        for (int lane = 0; lane < LANES; ++lane) product.lane(output, lane, sums[lane]);
        for (int distance = LANES / 2; distance > 0; distance /= 2) {
            std::memcpy(before, sums, sizeof(sums));
            for (int lane = 0; lane < LANES; ++lane)
                for (int row = 0; row < ROWS; ++row)
                    sums[lane][row] += before[lane ^ distance][row];
        }
        product.store(output, sums[0]);
    }
    return true;
}

#endif

template <typename T, int BITS>
bool run_rows(const GroupedGemv& work, void* stream) {
    switch (work.num_rows) {
        case 1:
            return run<T, BITS, 1>(work, stream);
        case 2:
            return run<T, BITS, 2>(work, stream);
        case 3:
        case 4:
            return run<T, BITS, 4>(work, stream);
        default:
            return false;
    }
}

template <typename T>
bool run_bits(const GroupedGemv& work, void* stream) {
    if (work.bits == 4) return run_rows<T, 4>(work, stream);
    return work.bits == 8 && work.minima == nullptr && run_rows<T, 8>(work, stream);
}

}  // namespace

bool run_grouped_gemv(const GroupedGemv& work, void* stream) {
    if (work.half % VALUES != 0 || work.group_size % VALUES != 0) return false;
    switch (work.number) {
        case Number::float32:
            return run_bits<float>(work, stream);
        case Number::float16:
            return run_bits<Half>(work, stream);
        case Number::bfloat16:
            return run_bits<BFloat>(work, stream);
    }
    return false;
}

}  // namespace octavo

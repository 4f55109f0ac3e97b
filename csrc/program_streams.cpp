// Instructions of models whose residual is several streams side by side. Those of a whole row's
// statistics run a few times a step: plain loops, which add up in double and so give every
// instruction set the same bits.
#include <algorithm>
#include <cmath>

#include "common/check.h"
#include "program.h"

namespace octavo {

namespace {

void check_cols(const char* name, const char* which, const Buffer& buffer, int64_t expected) {
    check(buffer.matrix.cols == expected, name, ": ", which, " has ", buffer.matrix.cols,
          " columns; it must have ", expected);
}

void check_f32(const char* name, const char* which, const Buffer& buffer, Rows rows) {
    check(buffer.matrix.dtype == Dtype::F32 && buffer.rows == rows, name, ": ", which,
          " must be f32, with rows as dst");
}

// Both of floats, of the same rows and columns.
void check_alike(const char* name, const Buffer& to, const Buffer& from) {
    check_f32(name, "dst", to, to.rows);
    check_f32(name, "src", from, to.rows);
    check_cols(name, "src", from, to.matrix.cols);
}

const float* floats(const cpu::Matrix& matrix, int64_t row) {
    return reinterpret_cast<const float*>(matrix.row(row));
}

double mean_square(const float* x, int64_t count) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
        sum += static_cast<double>(x[i]) * x[i];
    }
    return sum / static_cast<double>(count);
}

}  // namespace

void Program::mix(int dst, int src, int weights, int64_t inputs, float offset) {
    const Buffer& to = at("mix", dst);
    const Buffer& from = at("mix", src);
    const Buffer& weight = at("mix", weights);
    check_f32("mix", "dst", to, to.rows);
    check_f32("mix", "src", from, to.rows);
    check_f32("mix", "weights", weight, to.rows);
    check(inputs >= 1 && from.matrix.cols % inputs == 0, "mix: ", inputs, " streams of ",
          from.matrix.cols, " columns");
    const int64_t width = from.matrix.cols / inputs;
    check(to.matrix.cols % width == 0, "mix: dst has ", to.matrix.cols,
          " columns; they must be whole streams of ", width);
    check_cols("mix", "weights", weight, inputs * (to.matrix.cols / width));
    check_overlap("mix", to, from, false);
    check_overlap("mix", to, weight, false);
    push({to.rows, Mix{to.matrix, from.matrix, weight.matrix, width, offset}});
}

void Program::match_rms(int dst, int src, int like, float floor) {
    const Buffer& to = at("match_rms", dst);
    const Buffer& from = at("match_rms", src);
    const Buffer& other = at("match_rms", like);
    check_alike("match_rms", to, from);
    check_f32("match_rms", "like", other, to.rows);
    check(floor > 0, "match_rms: floor is ", floor, "; it must be above 0");
    check_overlap("match_rms", to, from, true);
    check_overlap("match_rms", to, other, false);
    push({to.rows, MatchRms{to.matrix, from.matrix, other.matrix, floor}});
}

void Program::sparsify(int dst, int src, float deviations) {
    const Buffer& to = at("sparsify", dst);
    const Buffer& from = at("sparsify", src);
    check_alike("sparsify", to, from);
    check_overlap("sparsify", to, from, true);
    push({to.rows, Sparsify{to.matrix, from.matrix, deviations}});
}

void Program::scale_columns(int dst, int src, std::span<const float> factors) {
    const Buffer& to = at("scale_columns", dst);
    const Buffer& from = at("scale_columns", src);
    check_alike("scale_columns", to, from);
    check(static_cast<int64_t>(factors.size()) == to.matrix.cols, "scale_columns: ", factors.size(),
          " factors of ", to.matrix.cols, " columns");
    check_overlap("scale_columns", to, from, true);
    push({to.rows, ScaleColumns{to.matrix, from.matrix, keep(factors, factors.size())}});
}

void Program::run_instruction(const Mix& mix, Range rows) {
    const cpu::Kernels& kernels = team_.kernels();
    const int64_t inputs = mix.src.cols / mix.width;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const float* weights = floats(mix.weights, r);
        for (int64_t out = 0; out < mix.dst.cols / mix.width; ++out) {
            const cpu::Matrix to = mix.dst.columns(out * mix.width, mix.width);
            for (int64_t in = 0; in < inputs; ++in) {
                const cpu::Matrix from = mix.src.columns(in * mix.width, mix.width);
                cpu::RowOpArgs args{.op = in == 0 ? cpu::RowOp::Scale : cpu::RowOp::Add,
                                    .dst = to,
                                    .src = in == 0 ? from : to};
                args.other = from;
                args.factor = weights[out * inputs + in] + mix.offset;
                kernels.row_op(args, r, r + 1);
            }
        }
    }
}

void Program::run_instruction(const MatchRms& match, Range rows) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const float* from = floats(match.src, r);
        const double own =
            std::max(mean_square(from, match.src.cols), static_cast<double>(match.floor));
        const double wanted = mean_square(floats(match.like, r), match.like.cols);
        const auto factor = static_cast<float>(std::sqrt(wanted / own));
        auto* to = reinterpret_cast<float*>(match.dst.row(r));
        for (int64_t i = 0; i < match.dst.cols; ++i) {
            to[i] = from[i] * factor;
        }
    }
}

void Program::run_instruction(const Sparsify& sparsify, Range rows) {
    const int64_t cols = sparsify.src.cols;
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const float* from = floats(sparsify.src, r);
        double sum = 0.0;
        for (int64_t i = 0; i < cols; ++i) {
            sum += from[i];
        }
        const double mean = sum / static_cast<double>(cols);
        double squares = 0.0;
        for (int64_t i = 0; i < cols; ++i) {
            squares += (from[i] - mean) * (from[i] - mean);
        }
        const double deviation = std::sqrt(squares / static_cast<double>(cols));
        const auto limit = static_cast<float>(mean + sparsify.deviations * deviation);
        auto* to = reinterpret_cast<float*>(sparsify.dst.row(r));
        for (int64_t i = 0; i < cols; ++i) {
            const float above = from[i] - limit;
            to[i] = above < 0.0F ? 0.0F : above;  // in this order a NaN survives
        }
    }
}

void Program::run_instruction(const ScaleColumns& scale, Range rows) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
        const float* from = floats(scale.src, r);
        auto* to = reinterpret_cast<float*>(scale.dst.row(r));
        for (int64_t i = 0; i < scale.dst.cols; ++i) {
            to[i] = from[i] * scale.factors[i];
        }
    }
}

}  // namespace octavo

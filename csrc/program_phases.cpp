// Where workers need not wait for each other between two instructions. Decided once, as the
// instructions are added; the work of an instruction, and so every bit, is the same either way.
//
//  - Instructions of rows share rows alike: a worker goes on with those that it has just written.
//  - A norm of few rows: each worker makes all of them for itself, and multiplies those.
//  - Queries, keys and values of few rows: whoever completes a head's columns makes it ready.
//
// Memory is planned instruction by instruction: what one reads may be what the next one writes, and
// then all have to wait.
#include <algorithm>
#include <cstring>

#include "program.h"

namespace octavo {

using cpu::Matrix;

void Program::push(Instruction instruction) {
    instructions_.push_back(std::move(instruction));
    if (!joins_phases_) {
        return;
    }
    const Instruction& last = instructions_.back();
    if (const auto* product = std::get_if<Product>(&last.args)) {
        join_norm(*product);
    } else if (const auto* attention = std::get_if<Attention>(&last.args)) {
        join_heads(*attention);
    } else {
        join_rows();
    }
}

const cpu::NormArgs* Program::norm_of(const Instruction& instruction) {
    if (const auto* norm = std::get_if<LayerNorm>(&instruction.args)) {
        return &norm->args;
    }
    return std::get_if<cpu::NormArgs>(&instruction.args);
}

bool Program::are_apart(const Matrix& a, const Matrix& b, Rows rows) const {
    const auto end = [&](const Matrix& m) {
        return m.data + max_rows(rows) * m.cols * size_of(m.dtype);
    };
    return a.data == nullptr || b.data == nullptr || end(a) <= b.data || end(b) <= a.data;
}

// Of an instruction whose workers each have some rows and nothing of others; of a mixture of
// experts what it does last.
std::optional<Program::Touched> Program::touched_rows(const Instruction& instruction) {
    if (const cpu::NormArgs* norm = norm_of(instruction)) {
        auto* added = reinterpret_cast<std::byte*>(const_cast<float*>(norm->add));
        const Matrix add{added, norm->src.cols, Dtype::F32};
        return Touched{{norm->src, add}, {norm->dst, added == nullptr ? Matrix{} : norm->src}};
    }
    if (const auto* op = std::get_if<cpu::RowOpArgs>(&instruction.args)) {
        if (op->op != cpu::RowOp::Select) {
            return Touched{{op->src, op->other}, {op->dst}};
        }
    }
    if (const auto* gate = std::get_if<Gate>(&instruction.args)) {
        return Touched{{gate->scale.src, gate->scores}, {gate->scale.dst}};
    }
    if (const auto* quantize = std::get_if<Quantize>(&instruction.args)) {
        return Touched{{quantize->args.src}, {}};
    }
    if (const auto* moe = std::get_if<Moe>(&instruction.args)) {
        const Matrix& results = moe->results;
        const int64_t cols = moe->routing.top_k * results.cols;  // of all pairs of a token
        return Touched{{Matrix{results.data, cols, results.dtype}}, {moe->dst}};
    }
    return std::nullopt;
}

// Whether what `now` touches is no part of what other workers may still do in `before`, who have
// rows of theirs only where both mean the same matrix.
bool Program::are_free(const Touched& before, const Touched& now, Rows rows) const {
    const auto is_free = [&](const Matrix& written, const Matrix& other) {
        const bool is_same = written.data == other.data && written.cols == other.cols &&
                             written.dtype == other.dtype;
        return is_same || are_apart(written, other, rows);
    };
    const auto are_all_free = [&](const auto& written, const auto& others) {
        return std::ranges::all_of(written, [&](const Matrix& w) {
            return std::ranges::all_of(others, [&](const Matrix& o) { return is_free(w, o); });
        });
    };
    return are_all_free(now.written, before.read) && are_all_free(now.written, before.written) &&
           are_all_free(before.written, now.read);
}

// With all since the workers last met, which may be several.
void Program::join_rows() {
    Instruction& last = instructions_.back();
    const std::optional<Touched> now = touched_rows(last);
    if (!now || std::holds_alternative<Moe>(last.args)) {
        return;
    }
    size_t index = instructions_.size() - 1;
    do {
        if (index == 0) {
            return;
        }
        const Instruction& before = instructions_[--index];
        const std::optional<Touched> of_before = touched_rows(before);
        if (!of_before || before.rows != last.rows || !are_free(*of_before, *now, last.rows)) {
            return;
        }
    } while (instructions_[index].is_of_own_rows);
    last.is_of_own_rows = true;
}

// Between the norm and its product there is only what makes the rows ready for it.
void Program::join_norm(const Product& product) {
    const cpu::LinearArgs& args = product.args;
    size_t index = instructions_.size() - 1;
    Instruction* convert = nullptr;
    Matrix shrunken = {};
    while (index > 0) {
        Instruction& before = instructions_[--index];
        const auto* op = std::get_if<cpu::RowOpArgs>(&before.args);
        if (const auto* shrink = std::get_if<Shrink>(&before.args)) {
            shrunken = shrink->args.u;
        } else if (op != nullptr && op->op == cpu::RowOp::Convert && convert == nullptr &&
                   op->dst.data == args.src.data) {
            convert = &before;
        } else if (!std::holds_alternative<Quantize>(before.args)) {
            break;
        }
    }
    Instruction& first = instructions_[index];
    const cpu::NormArgs* norm = norm_of(first);
    const Matrix converted =
        convert == nullptr ? Matrix{} : std::get<cpu::RowOpArgs>(convert->args).dst;
    const Matrix& wanted =
        convert == nullptr ? args.src : std::get<cpu::RowOpArgs>(convert->args).src;
    if (norm == nullptr || norm->add != nullptr || norm->dst.data != wanted.data) {
        return;
    }
    // While one multiplies already, another one may still read or write what the norm does.
    const auto is_apart = [&](const Matrix& matrix) {
        return are_apart(norm->src, matrix, first.rows) && are_apart(norm->dst, matrix, first.rows);
    };
    if (!are_apart(norm->src, norm->dst, first.rows) || !is_apart(converted) ||
        !is_apart(shrunken) || !is_apart(args.dst)) {
        return;
    }
    for (Instruction* instruction : {&first, convert}) {
        if (instruction != nullptr) {
            instruction->is_copied = true;
        }
    }
    const int64_t num_bytes = kOwnRows * norm->dst.cols * size_of(Dtype::F32);
    copy_bytes_ = std::max(copy_bytes_, (num_bytes + 4095) / 4096 * 4096);
}

void Program::join_heads(const Attention& attention) {
    const size_t num_before = instructions_.size() - 1;
    auto* product =
        num_before == 0 ? nullptr : std::get_if<Product>(&instructions_[num_before - 1].args);
    const cpu::AttentionArgs& args = attention.args;
    if (product == nullptr || ranks_ != nullptr || args.norm == cpu::HeadNorm::Row ||
        product->args.mode != cpu::LinearMode::Store || product->args.dst.data != args.qkv.data ||
        product->args.dst.dtype != args.qkv.dtype || product->args.weight.rows != args.qkv.cols) {
        return;
    }
    instructions_[num_before - 1].prepares_heads = true;
    const auto num_heads = static_cast<size_t>(args.head_units());
    if (head_panels_.size() < num_heads) {
        head_panels_ = std::vector<std::atomic<int32_t>>(num_heads);
    }
}

bool Program::needs_meeting(size_t index, size_t end, bool is_few) const {
    if (index + 1 == end) {
        return !joins_phases_ || ranks_ != nullptr;  // else the team meets where its run ends
    }
    const Instruction& next = instructions_[index + 1];
    const bool is_skipped = is_few && std::holds_alternative<Quantize>(next.args);
    const bool reads_all_rows = is_few && next.is_copied;
    return !(is_few && instructions_[index].is_copied) &&
           (!next.is_of_own_rows || is_skipped || reads_all_rows);
}

// In the worker's own memory, and its share for all, who may read it once they have met.
template <class Args>
void Program::compute_copy(Args args, void (*kernel)(const Args&, int64_t, int64_t),
                           int64_t num_rows, Range own, std::byte* copy) {
    std::byte* const shared = args.dst.row(own.begin);
    args.dst.data = copy;
    kernel(args, 0, num_rows);
    const std::byte* const from = args.dst.row(own.begin);
    std::memcpy(shared, from, static_cast<size_t>(args.dst.row(own.end) - from));
}

template void Program::compute_copy(cpu::NormArgs, void (*)(const cpu::NormArgs&, int64_t, int64_t),
                                    int64_t, Range, std::byte*);
template void Program::compute_copy(cpu::RowOpArgs,
                                    void (*)(const cpu::RowOpArgs&, int64_t, int64_t), int64_t,
                                    Range, std::byte*);

// Those whose columns are complete with this worker's panels: the last one of those who have some
// of a head's makes it ready.
void Program::prepare_own_heads(const cpu::AttentionArgs& args, int64_t num_tokens, int worker) {
    const int64_t num_units = args.head_units();
    const auto prepare = [&](Range heads) {
        for (int64_t token = 0; token < num_tokens && heads.begin < heads.end; ++token) {
            const int64_t first = token * num_units;
            team_.kernels().prepare_heads(args, first + heads.begin, first + heads.end);
        }
    };
    Range ready = {0, 0};  // neighbours, at once
    for (int64_t unit = 0; unit < num_units; ++unit) {
        if (!completes_head(args, unit, worker)) {
            prepare(ready);
            ready = {unit + 1, unit + 1};
        } else {
            ready.end = unit + 1;
        }
    }
    prepare(ready);
}

// With its panels, which it has just multiplied: of a query head, or of a KV head's keys and
// values.
bool Program::completes_head(const cpu::AttentionArgs& args, int64_t unit, int worker) {
    const int64_t per_head = args.kv.head_dim / cpu::kPanelRows;
    const int64_t num_kv_heads = args.kv.num_kv_heads;
    const Range own = split(args.qkv.cols / cpu::kPanelRows, worker, team_.num_threads());
    const auto panels_of = [&](int64_t head) {
        const int64_t first = std::max(own.begin, head * per_head);
        return std::max<int64_t>(0, std::min(own.end, (head + 1) * per_head) - first);
    };
    const bool is_kv = unit >= args.num_heads;
    const int64_t wanted = is_kv ? 2 * per_head : per_head;
    const int64_t count = panels_of(unit) + (is_kv ? panels_of(unit + num_kv_heads) : 0);
    if (count == 0 || count == wanted) {
        return count == wanted;
    }
    std::atomic<int32_t>& there = head_panels_[static_cast<size_t>(unit)];
    const auto added = static_cast<int32_t>(count);
    if (there.fetch_add(added, std::memory_order_acq_rel) + added < wanted) {
        return false;
    }
    there.store(0, std::memory_order_relaxed);  // for the next layer, once all have met
    return true;
}

}  // namespace octavo

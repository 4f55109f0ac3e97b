// Python bindings of the sampler and of Philox.
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "bindings.h"
#include "common/check.h"
#include "common/team.h"
#include "cpu/philox.h"
#include "cpu/sampling.h"

namespace octavo {
namespace {

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

int64_t length(const auto& array) { return static_cast<int64_t>(array.shape(0)); }

// The table is an array of records, which nanobind has no type for: this looks at its memory.
class TableView {
  public:
    explicit TableView(nb::handle table) {
        if (PyObject_GetBuffer(table.ptr(), &buffer_, PyBUF_C_CONTIGUOUS) != 0) {
            throw nb::python_error();
        }
    }
    ~TableView() { PyBuffer_Release(&buffer_); }
    TableView(const TableView&) = delete;
    TableView& operator=(const TableView&) = delete;

    const SamplingRow* rows() const {
        check(buffer_.itemsize == sizeof(SamplingRow), "table: records of ", buffer_.itemsize,
              " bytes, expected ", sizeof(SamplingRow));
        return static_cast<const SamplingRow*>(buffer_.buf);
    }
    int64_t num_rows() const { return buffer_.len / static_cast<int64_t>(sizeof(SamplingRow)); }

  private:
    Py_buffer buffer_{};
};

RaggedView ragged(const char* name, int64_t num_rows, const Vector<const int32_t>& starts,
                  const Vector<const int32_t>& ids, const Vector<const float>* values) {
    if (!starts.is_valid()) return {};
    check(length(starts) == num_rows + 1, name, "_starts: length must be ", num_rows + 1);
    const int64_t size = ids.is_valid() ? length(ids) : 0;
    check(starts.data()[0] == 0 && starts.data()[num_rows] == size, name,
          "_starts: must begin at 0 and end at the number of ids, ", size);
    for (int64_t s = 0; s < num_rows; ++s) {
        check(starts.data()[s] <= starts.data()[s + 1], name, "_starts: must not descend");
    }
    if (size == 0) return {};
    if (values == nullptr) return {starts.data(), ids.data(), nullptr};
    check(values->is_valid() && length(*values) == size, name, "_values: one per id");
    return {starts.data(), ids.data(), values->data()};
}

MaskView mask_view(int64_t num_rows, const Vector<const int32_t>& rows,
                   const Matrix<const uint32_t>& bits) {
    if (!rows.is_valid()) return {};
    check(bits.is_valid(), "mask_bits: needed when mask_rows are given");
    check(length(rows) == num_rows, "mask_rows: length must be ", num_rows);
    for (int64_t s = 0; s < num_rows; ++s) {
        check(rows.data()[s] < length(bits), "mask_rows: ", rows.data()[s], " is not a mask");
    }
    return {rows.data(), bits.data(), static_cast<int64_t>(bits.shape(1))};
}

void check_rows(const SampleArgs& args, int64_t table_rows) {
    for (int64_t s = 0; s < args.num_rows; ++s) {
        check(args.rows[s] >= 0 && args.rows[s] < table_rows, "rows: ", args.rows[s],
              " is not a row of the table");
        check(args.positions[s] >= 0 && args.positions[s] <= args.history_stride,
              "positions: ", args.positions[s], " is outside the history");
        check(args.targets[s] < args.vocab, "targets: ", args.targets[s],
              " is outside the vocabulary");
    }
}

void check_chosen(const SampleArgs& args) {
    if (args.chosen.starts == nullptr) return;
    for (int64_t s = 0; s < args.num_rows; ++s) {
        check(args.chosen.starts[s + 1] - args.chosen.starts[s] <= args.num_logprobs,
              "chosen_starts: a row has more than num_logprobs ids, ", args.num_logprobs);
    }
}

void bound_sample(Team& team, Matrix<float> logits, nb::object table, Vector<const int32_t> rows,
                  Vector<const int32_t> positions, Vector<const int32_t> targets,
                  Matrix<const int32_t> history, Vector<const int32_t> bias_starts,
                  Vector<const int32_t> bias_ids, Vector<const float> bias_values,
                  Vector<const int32_t> allow_starts, Vector<const int32_t> allow_ids,
                  Vector<const int32_t> mask_rows, Matrix<const uint32_t> mask_bits,
                  Vector<const int32_t> chosen_starts, Vector<const int32_t> chosen_ids,
                  int num_logprobs, Vector<int32_t> tokens, Vector<uint8_t> status,
                  Vector<float> logprobs, Vector<int32_t> ranks, Matrix<int32_t> top_ids,
                  Matrix<float> top_logprobs) {
    const TableView view(table);
    SampleArgs args{};
    args.logits = logits.data();
    args.num_rows = length(logits);
    args.vocab = static_cast<int64_t>(logits.shape(1));
    check(args.vocab >= 1 && args.vocab <= kMaxVocab, "logits: a vocabulary of ", args.vocab,
          " is outside 1 to ", kMaxVocab);
    args.table = view.rows();
    check(length(rows) == args.num_rows && length(positions) == args.num_rows &&
              length(targets) == args.num_rows && length(tokens) == args.num_rows &&
              length(status) == args.num_rows,
          "rows, positions, targets, tokens and status must have as many entries as logits has "
          "rows, ",
          args.num_rows);
    check(length(history) == view.num_rows(), "history: must have as many rows as the table");
    args.rows = rows.data();
    args.positions = positions.data();
    args.targets = targets.data();
    args.history = history.data();
    args.history_stride = static_cast<int64_t>(history.shape(1));
    check_rows(args, view.num_rows());
    args.bias = ragged("bias", args.num_rows, bias_starts, bias_ids, &bias_values);
    args.allowed = ragged("allow", args.num_rows, allow_starts, allow_ids, nullptr);
    args.masks = mask_view(args.num_rows, mask_rows, mask_bits);
    args.chosen = ragged("chosen", args.num_rows, chosen_starts, chosen_ids, nullptr);
    args.num_logprobs = num_logprobs;
    check_chosen(args);
    args.tokens = tokens.data();
    args.status = status.data();
    if (num_logprobs >= 0) {
        check(logprobs.is_valid() && ranks.is_valid() && top_ids.is_valid() &&
                  top_logprobs.is_valid(),
              "logprobs, ranks, top_ids and top_logprobs are needed when num_logprobs is ",
              num_logprobs);
        const auto width = static_cast<size_t>(num_logprobs);
        check(length(logprobs) == args.num_rows && length(ranks) == args.num_rows &&
                  length(top_ids) == args.num_rows && length(top_logprobs) == args.num_rows &&
                  top_ids.shape(1) == width && top_logprobs.shape(1) == width,
              "logprobs and ranks must be [rows], top_ids and top_logprobs [rows, num_logprobs]");
        args.logprobs = logprobs.data();
        args.ranks = ranks.data();
        args.top_ids = top_ids.data();
        args.top_logprobs = top_logprobs.data();
    }
    nb::gil_scoped_release unlocked;
    sample(team, args);
}

std::tuple<uint32_t, uint32_t, uint32_t, uint32_t> bound_philox(uint64_t key, uint64_t counter) {
    const PhiloxWords words = philox(key, counter);
    return {words[0], words[1], words[2], words[3]};
}

}  // namespace

void bind_sampling(nb::module_& module) {
    using nb::arg;
    // Nothing is converted: what came back would be written to a copy.
    module.def("sample", &bound_sample, arg("team"), arg("logits").noconvert(), arg("table"),
               arg("rows").noconvert(), arg("positions").noconvert(), arg("targets").noconvert(),
               arg("history").noconvert(), arg("bias_starts").noconvert().none(),
               arg("bias_ids").noconvert().none(), arg("bias_values").noconvert().none(),
               arg("allow_starts").noconvert().none(), arg("allow_ids").noconvert().none(),
               arg("mask_rows").noconvert().none(), arg("mask_bits").noconvert().none(),
               arg("chosen_starts").noconvert().none(), arg("chosen_ids").noconvert().none(),
               arg("num_logprobs"), arg("tokens").noconvert(), arg("status").noconvert(),
               arg("logprobs").noconvert().none(), arg("ranks").noconvert().none(),
               arg("top_ids").noconvert().none(), arg("top_logprobs").noconvert().none());
    module.def("philox", &bound_philox, arg("key"), arg("counter"));
}

}  // namespace octavo

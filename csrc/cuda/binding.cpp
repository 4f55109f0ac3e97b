// The product as an operator of torch, by its stable ABI: one build serves later versions too.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "grouped_gemv.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void* current_stream([[maybe_unused]] const Tensor& x) {
#ifdef OCTAVO_ON_DEVICE
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
    return stream;
#else
    return nullptr;
#endif
}

octavo::Number number_of(const Tensor& x) {
    switch (x.scalar_type()) {
        case ScalarType::Float:
            return octavo::Number::float32;
        case ScalarType::Half:
            return octavo::Number::float16;
        default:
            STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, "x must have a float dtype");
            return octavo::Number::bfloat16;
    }
}

void grouped_gemv(Tensor out, const Tensor& x, const Tensor& packed, const Tensor& scales,
                  std::optional<Tensor> minima, std::optional<Tensor> bias, int64_t bits,
                  int64_t half) {
    for (const Tensor* tensor : {&std::as_const(out), &x, &packed, &scales})
        STD_TORCH_CHECK(tensor->is_contiguous() && tensor->dim() == 2, "matrices must be whole");
    const int64_t num_inputs = x.size(1);
    STD_TORCH_CHECK(packed.size(1) * 8 == num_inputs * bits && out.size(0) == x.size(0) &&
                        out.size(1) == packed.size(0) && scales.size(0) == packed.size(0),
                    "shapes do not meet");
    const bool is_wide = out.scalar_type() == ScalarType::Float;
    STD_TORCH_CHECK(is_wide || out.scalar_type() == x.scalar_type(),
                    "out must be as x, or float32");
    STD_TORCH_CHECK(
        !bias || (bias->scalar_type() == x.scalar_type() && bias->numel() == packed.size(0)),
        "bias must be as x");
    const octavo::GroupedGemv work{
        out.data_ptr(),
        x.data_ptr(),
        static_cast<const uint8_t*>(packed.data_ptr()),
        static_cast<const uint16_t*>(scales.data_ptr()),
        minima ? static_cast<const uint16_t*>(minima->data_ptr()) : nullptr,
        bias ? bias->data_ptr() : nullptr,
        number_of(x),
        is_wide,
        static_cast<int>(x.size(0)),
        static_cast<int>(packed.size(0)),
        static_cast<int>(num_inputs),
        static_cast<int>(num_inputs / scales.size(1)),
        static_cast<int>(half),
        static_cast<int>(bits)};
    STD_TORCH_CHECK(octavo::run_grouped_gemv(work, current_stream(x)),
                    "no kernel takes this product");
}

}  // namespace

STABLE_TORCH_LIBRARY(octavo_cuda, library) {
    library.def(
        "grouped_gemv(Tensor(a!) out, Tensor x, Tensor packed, Tensor scales, Tensor? minima, "
        "Tensor? bias, int bits, int half) -> ()");
}

#ifdef OCTAVO_ON_DEVICE
STABLE_TORCH_LIBRARY_IMPL(octavo_cuda, CUDA, library) {
#else
STABLE_TORCH_LIBRARY_IMPL(octavo_cuda, CPU, library) {
#endif
    library.impl("grouped_gemv", TORCH_BOX(&grouped_gemv));
}

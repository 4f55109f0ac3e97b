// LoRA adapters: what each adds to which linear layers, packed for the kernels, and the slots that
// hold those which steps may use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "common/memory.h"
#include "cpu/kernels.h"

namespace octavo {

// The numbers of adapters' files.
enum class StoredDtype : uint8_t { F32, F16, BF16 };

constexpr int64_t size_of(StoredDtype dtype) { return dtype == StoredDtype::F32 ? 4 : 2; }

// A matrix of numbers, row by row, as it lies in a file: at any address.
struct StoredMatrix {
    const std::byte* data;
    StoredDtype dtype;
    int64_t rows;
    int64_t cols;
};

// What an adapter adds to one of the parts that a linear layer is stacked from.
struct AdapterPart {
    int64_t part;
    StoredMatrix down;  // [rank, in]
    StoredMatrix up;    // [outputs of the part, rank]
    float scale;
};

// Outputs of a layer: from `first` on, up to `end`.
struct OutputRange {
    int64_t first;
    int64_t end;

    int64_t rows() const { return end - first; }
};

// A linear layer that adapters may add to.
struct AdapterSite {
    std::vector<int64_t> sizes;  // outputs of its parts, one below the other
    int64_t cols;
    // Those that this process computes. Only of these an adapter's up matrices are kept; its down
    // matrices are kept whole, because the rows that they shrink are shared.
    std::vector<OutputRange> own;

    int64_t rows() const;
    int64_t own_rows() const;
};

// Memory for the next adapter whose pages are real already: making them so takes longer than
// packing. It comes from an adapter that went, or is made before it is needed. For several threads.
class SpareMemory {
  public:
    // Zeroed, of at least so many bytes.
    Memory take(int64_t num_bytes);
    // The larger of what is there and this stays.
    void give(Memory memory);
    // Touches every page, unless so much is there.
    void prepare(int64_t num_bytes);
    int64_t num_bytes() const;

  private:
    bool fits(int64_t num_bytes) const;

    mutable std::mutex mutex_;
    Memory memory_;
};

class PackedAdapter;

// Made with its sites before the first adapter is packed.
class AdapterSlots {
  public:
    // Throws ValueError on what cannot be.
    AdapterSlots(int64_t num_slots, int64_t max_rank, Dtype dtype);

    // `own` ascend, and each begins with a panel; with none an adapter adds nothing here.
    int64_t add_site(std::vector<int64_t> sizes, int64_t cols, std::vector<OutputRange> own);
    // Null empties the slot. Not while a program runs.
    void set(int64_t slot, std::shared_ptr<const PackedAdapter> adapter);

    int64_t num_slots() const { return static_cast<int64_t>(held_.size()); }
    bool is_set(int64_t slot) const { return held_[static_cast<size_t>(slot)] != nullptr; }
    Dtype dtype() const { return dtype_; }
    const AdapterSite& site(int64_t index) const;
    int64_t num_sites() const { return static_cast<int64_t>(sites_.size()); }
    // Columns of a site's shrunken rows: of all parts at the highest rank.
    int64_t shrunken_cols(int64_t site) const;
    int64_t max_rank() const { return max_rank_; }
    // By slot; null where a slot adds nothing to the site. Lives as long as this does.
    const cpu::AdapterWeights* const* of_site(int64_t site) const;
    const std::shared_ptr<SpareMemory>& spare() const { return spare_; }

  private:
    std::shared_ptr<SpareMemory> spare_ = std::make_shared<SpareMemory>();
    int64_t max_rank_;
    Dtype dtype_;
    std::vector<AdapterSite> sites_;
    std::vector<std::shared_ptr<const PackedAdapter>> held_;
    std::vector<std::vector<const cpu::AdapterWeights*>> weights_;  // [site][slot]
};

// What an adapter adds to a site: its parts, ascending.
struct AdapterAddition {
    int64_t site;
    std::vector<AdapterPart> parts;
};

class PackedAdapter {
  public:
    // With the sites that the slots have; each is in `added` at most once. Throws ValueError when
    // shapes do not agree.
    PackedAdapter(const AdapterSlots& slots, std::span<const AdapterAddition> added);
    ~PackedAdapter();
    PackedAdapter(const PackedAdapter&) = delete;
    PackedAdapter& operator=(const PackedAdapter&) = delete;

    int64_t num_bytes() const { return num_bytes_; }
    int64_t num_sites() const { return static_cast<int64_t>(layers_.size()); }
    const cpu::AdapterWeights* of_site(int64_t site) const {
        const auto& layer = layers_[static_cast<size_t>(site)];
        return layer == nullptr ? nullptr : &layer->weights;
    }

  private:
    struct Layer {
        int64_t first_byte;  // in the memory of all layers
        std::vector<cpu::AdapterRun> runs;
        std::vector<float> scales;
        cpu::AdapterWeights weights;
    };

    static Layer place(const AdapterSlots& slots, const AdapterAddition& addition,
                       int64_t& num_bytes);
    void fill(const AdapterSite& site, const AdapterAddition& addition, Layer& layer);

    std::shared_ptr<SpareMemory> spare_;  // where the memory goes in the end
    int64_t num_bytes_ = 0;
    Memory memory_;
    std::vector<std::unique_ptr<Layer>> layers_;  // by site
};

}  // namespace octavo

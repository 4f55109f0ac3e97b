// A block of zeroed memory, aligned to 64 bytes, whose pages are real only once they are touched.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int64_t kSharedAlignment = 4096;

class Memory {
  public:
    Memory() = default;
    explicit Memory(int64_t num_bytes);
    // Bytes of a file in memory, which other processes see too; it is grown where it is shorter.
    // `offset` is a multiple of kSharedAlignment.
    static Memory shared(int file, int64_t offset, int64_t num_bytes);
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    std::byte* data() const { return data_; }
    int64_t size() const { return size_; }

  private:
    std::byte* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace octavo

#include "common/memory.h"

#include <cstring>
#include <new>
#include <utility>

#include "common/check.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#define OCTAVO_HAS_MMAP 1
#endif

namespace octavo {

#ifdef OCTAVO_HAS_MMAP

Memory::Memory(int64_t num_bytes) : size_(num_bytes) {
    check(num_bytes >= 0, "memory: ", num_bytes, " bytes");
    if (num_bytes == 0) {
        return;
    }
    void* pages = mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        throw std::bad_alloc();
    }
#ifdef MADV_HUGEPAGE
    // Weights are streamed: with 4 KiB pages the address translation would cost as much as the
    // data.
    madvise(pages, static_cast<size_t>(num_bytes), MADV_HUGEPAGE);
#endif
    data_ = static_cast<std::byte*>(pages);
}

Memory Memory::shared(int file, int64_t offset, int64_t num_bytes) {
    check(offset >= 0 && offset % kSharedAlignment == 0 && num_bytes >= 1,
          "shared memory: ", num_bytes, " bytes at ", offset);
    struct stat facts{};
    check(fstat(file, &facts) == 0, "shared memory: no file ", file);
    const int64_t end = offset + num_bytes;
    if (facts.st_size < end && ftruncate(file, end) != 0) {
        throw std::bad_alloc();
    }
    void* pages = mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE, MAP_SHARED,
                       file, offset);
    if (pages == MAP_FAILED) {
        throw std::bad_alloc();
    }
    Memory memory;
    memory.data_ = static_cast<std::byte*>(pages);
    memory.size_ = num_bytes;
    return memory;
}

Memory::~Memory() {
    if (data_ != nullptr) {
        munmap(data_, static_cast<size_t>(size_));
    }
}

#else

Memory::Memory(int64_t num_bytes) : size_(num_bytes) {
    check(num_bytes >= 0, "memory: ", num_bytes, " bytes");
    if (num_bytes == 0) {
        return;
    }
    data_ = static_cast<std::byte*>(
        ::operator new(static_cast<size_t>(num_bytes), std::align_val_t{64}));
    std::memset(data_, 0, static_cast<size_t>(num_bytes));
}

Memory Memory::shared(int, int64_t, int64_t) { fail("shared memory: not on this system"); }

Memory::~Memory() { ::operator delete(data_, std::align_val_t{64}); }

#endif

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

}  // namespace octavo

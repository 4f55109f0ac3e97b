// The checksum of zlib's crc32, several times as fast where the processor has an instruction for
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace octavo {

// `value`: of what came before these bytes; 0 at the beginning.
uint32_t crc32(std::span<const std::byte> data, uint32_t value);

}  // namespace octavo

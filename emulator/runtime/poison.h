// The pattern in memory that nobody has written: as floats of 32 bits and as bfloat16 a signalling NaN, as floats of
// 16 bits a NaN, as an integer a number far out of range.
#pragma once

#include <cstddef>

namespace emulator {

// Does nothing where the settings say so.
void poison(void* pointer, size_t nbytes);

}  // namespace emulator

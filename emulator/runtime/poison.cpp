#include "poison.h"

#include "operation.h"
#include "settings.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace emulator {

void poison(void* pointer, size_t nbytes) {
  if (!settings().poison) return;
  constexpr uint16_t pattern = 0x7FA0;
  auto* bytes = static_cast<unsigned char*>(pointer);
  for (size_t done = 0; done < std::min<size_t>(nbytes, 64); ++done) {
    bytes[done] = static_cast<unsigned char>(done % 2 == 0 ? pattern & 0xFF : pattern >> 8);
  }
  for (size_t done = 64; done < nbytes;) {  // each round copies what the earlier ones have made, up to a cacheful
    const size_t now = std::min({done, nbytes - done, size_t{32} << 10});
    std::memcpy(bytes + done, bytes, now);
    done += now;
  }
}

}  // namespace emulator

#include "settings.h"

#include "operation.h"

#include <cstdlib>
#include <cstring>

namespace emulator {
namespace {

double number(const char* variable, double otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0' ? std::strtod(text, nullptr) : otherwise;
}

bool is_old(const char* stack) { return stack != nullptr && std::strcmp(stack, "old") == 0; }

}  // namespace

Settings& settings() {
  static Settings settings{
      .hbm_bytes = static_cast<size_t>(number("ASCEND_EMULATOR_HBM_BYTES", 8.0 * (1ull << 30))),
      .h2d_bytes_per_s = number("ASCEND_EMULATOR_H2D_BYTES_PER_S", 0),
      .d2h_bytes_per_s = number("ASCEND_EMULATOR_D2H_BYTES_PER_S", 0),
      .current_stack = !is_old(std::getenv("ASCEND_EMULATOR_STACK")),
  };
  return settings;
}

}  // namespace emulator

// For the Python package. A rate of 0 means no limit; copies that were started keep the rate they have.
ACL_EXPORT void ascend_emulator_set_hbm_bytes(size_t nbytes) { emulator::settings().hbm_bytes = nbytes; }
ACL_EXPORT void ascend_emulator_set_h2d(double bytes_per_s) { emulator::settings().h2d_bytes_per_s = bytes_per_s; }
ACL_EXPORT void ascend_emulator_set_d2h(double bytes_per_s) { emulator::settings().d2h_bytes_per_s = bytes_per_s; }

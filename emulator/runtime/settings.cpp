#include "settings.h"

#include "operation.h"

#include <cstdlib>
#include <string>

namespace emulator {
namespace {

std::string text(const char* variable, const char* otherwise) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

double number(const char* variable, const char* otherwise) {
  return std::strtod(text(variable, otherwise).c_str(), nullptr);
}

uint64_t count(const char* variable, const char* otherwise) {
  return std::strtoull(text(variable, otherwise).c_str(), nullptr, 10);
}

// The Python package lets no other word through.
Order order(const std::string& schedule) {
  if (schedule == "late") return Order::late;
  return schedule == "random" ? Order::random : Order::eager;
}

}  // namespace

Settings& settings() {
  static const bool dry = text("ASCEND_EMULATOR_DRY", "0") == "1";
  static Settings settings{
      .hbm_bytes = count("ASCEND_EMULATOR_HBM_BYTES", "8589934592"),
      .host_bytes = count("ASCEND_EMULATOR_HOST_BYTES", "0"),
      .h2d_bytes_per_s = number("ASCEND_EMULATOR_H2D_BYTES_PER_S", "0"),
      .d2h_bytes_per_s = number("ASCEND_EMULATOR_D2H_BYTES_PER_S", "0"),
      .host_memory_bytes_per_s = number("ASCEND_EMULATOR_HOST_MEMORY_BYTES_PER_S", "0"),
      .current_stack = text("ASCEND_EMULATOR_STACK", "current") != "old",
      .devices = static_cast<int>(count("ASCEND_EMULATOR_DEVICES", "1")),
      .schedule = order(text("ASCEND_EMULATOR_SCHEDULE", "eager")),
      .seed = count("ASCEND_EMULATOR_SEED", "0"),
      .races = text("ASCEND_EMULATOR_RACES", "0") == "1",
      .poison = text("ASCEND_EMULATOR_POISON", "1") == "1" && !dry,
      .dry = dry,
      .model = text("ASCEND_EMULATOR_MODEL", ""),
  };
  return settings;
}

}  // namespace emulator

// For the Python package. A rate of 0 means no limit; copies that were started keep the rate they have.
ACL_EXPORT int ascend_emulator_is_dry() { return emulator::settings().dry; }
ACL_EXPORT void ascend_emulator_set_hbm_bytes(size_t nbytes) { emulator::settings().hbm_bytes = nbytes; }
ACL_EXPORT void ascend_emulator_set_host_bytes(size_t nbytes) { emulator::settings().host_bytes = nbytes; }
ACL_EXPORT void ascend_emulator_set_h2d(double bytes_per_s) { emulator::settings().h2d_bytes_per_s = bytes_per_s; }
ACL_EXPORT void ascend_emulator_set_d2h(double bytes_per_s) { emulator::settings().d2h_bytes_per_s = bytes_per_s; }

#include "text.h"

#include "operation.h"

#include <cstdlib>
#include <cstring>

namespace emulator {

char* give(const std::string& text) { return strdup(text.c_str()); }

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char each : text) {
    if (each == '"' || each == '\\') result += '\\';
    result += static_cast<unsigned char>(each) < ' ' ? ' ' : each;
  }
  return result + '"';
}

}  // namespace emulator

ACL_EXPORT void ascend_emulator_free_text(char* text) { std::free(text); }

// Text for the Python package, which gives it back by ascend_emulator_free_text.
#pragma once

#include <string>

namespace emulator {

char* give(const std::string& text);

// As a JSON string, quotes included.
std::string quoted(const std::string& text);

}  // namespace emulator

#include "text.h"

#include "operation.h"

#include <cstdlib>
#include <cstring>

char* emulator::give(const std::string& text) { return strdup(text.c_str()); }

ACL_EXPORT void ascend_emulator_free_text(char* text) { std::free(text); }

// One copy between any two places. `function` is what was called, for messages; `room` is what the destination has.
#pragma once

#include "operation.h"

namespace emulator {

// own_call: see Operation.
aclError copy_now(const char* function, void* to, size_t room, const void* from, size_t nbytes, bool own_call = true);

// On a stream, and so at once only for pageable memory.
aclError copy_on_stream(const char* function, void* to, size_t room, const void* from, size_t nbytes,
                        aclrtStream stream, bool own_call = true);

// What late copies have not moved yet is moved, before the host goes on that has waited, and before memory is freed.
void land_late_bytes();

}  // namespace emulator

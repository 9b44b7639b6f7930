// Faults: calls that fail because they were told to.
#pragma once

#include "operation.h"

namespace emulator {

// ACL_SUCCESS, or the code with which this call of `function` is to fail; its message is kept already.
aclError fault(const char* function);

// The same for a call that goes well on a lost device: one that frees memory, or asks what an address is.
aclError fault_without_device(const char* function);

// A device that is lost runs nothing more, and every call that needs it fails.
bool device_is_lost();
aclError lost();

// Counts one operation towards the one with which the device is lost. Returns what submit() is to return.
aclError count_towards_loss();

// Whether this call is to go wrong in a way that nobody is told of, such as "lost_wait"; docs/faults.md has all.
bool misbehaves(const std::string& how);

// The body of an operation that never ends, but with the faults that there are now.
std::function<void()> until_faults_are_cleared();

// A kernel or copy that was told to comes to another value in the last bit of the first element that it writes.
void give_other_bits(Operation& operation);

}  // namespace emulator

// What a stream runs: one copy, fill, kernel, or record or wait of an event, with the memory it touches.
#pragma once

#include "joint_operation.h"
#include "work.h"

#include <acl/acl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#define ACL_EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {

class StreamPoint;

inline uintptr_t address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// Thrown by an operation that CANN would have refused when it was called. It is told once, and the stream lives on;
// what else an operation throws is the stream's error for good.
class Refusal : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A span of bytes that an operation reads or writes.
struct Range {
  const void* begin;
  size_t nbytes;
};

struct Operation {
  std::string name;
  std::vector<Range> reads;
  std::vector<Range> writes;
  // Runs on the stream's thread. What it throws is told at the next synchronisation.
  std::function<void()> body;
  std::shared_ptr<StreamPoint> awaits = nullptr;   // in another stream; to be reached before the body runs
  std::shared_ptr<StreamPoint> reaches = nullptr;  // right behind it
  Work work = {};                                  // for modelled time
  bool own_call = true;                            // false: issued by the same call as the one before
  std::shared_ptr<JointOperation> joint = nullptr;  // the other ranks have to be ready before the body runs
  // The body calls the program, or waits for a thread of it that does. A call that issues work must not wait for its end:
  // the program may need that very thread, or Python's lock, to come to it.
  bool calls_the_program = false;
};

// What it wrote. A copy to pageable memory names only what it reads, and writes as many bytes.
size_t bytes_written(const Operation& operation);

// Puts an operation at the end of a stream and returns at once. nullptr is the current device's default stream.
__attribute__((visibility("default"))) aclError submit(aclrtStream stream, Operation operation);

// Whether an operation's work is asked for.
__attribute__((visibility("default"))) bool models_time();

// torch calls an operator, which costs the modelled host something.
__attribute__((visibility("default"))) void torch_operator_begins();

// Whether kernels are to compute; not in a dry run.
__attribute__((visibility("default"))) bool computes();

// torch's allocator takes a block back, and may hand it out again for the stream that it belongs to.
__attribute__((visibility("default"))) void freed_by_torch(aclrtStream stream, Range block);

// The host reads or writes memory without a call to the runtime. Nothing is noted of memory that is not pinned.
__attribute__((visibility("default"))) void host_uses_pinned(const char* function, Range range, bool writes);

// Keeps a message for aclGetRecentErrMsg on this thread and returns the code, for `return fail(...)`.
__attribute__((visibility("default"))) aclError fail(aclError code, const std::string& message);

}  // namespace emulator

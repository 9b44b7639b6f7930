// What a stream runs: one copy, fill, kernel or event mark, with the memory it touches.
#pragma once

#include <acl/acl.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#define ACL_EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {

// A span of bytes that an operation reads or writes.
struct Range {
  const void* begin;
  size_t nbytes;
};

struct Operation {
  std::string name;
  std::vector<Range> reads;
  std::vector<Range> writes;
  // Runs on the stream's thread. What it throws becomes the stream's error, told at the next synchronisation.
  std::function<void()> body;
};

// Puts an operation at the end of a stream and returns at once. nullptr is the default stream.
__attribute__((visibility("default"))) aclError submit(aclrtStream stream, Operation operation);

// Keeps a message for aclGetRecentErrMsg on this thread and returns the code, for `return fail(...)`.
__attribute__((visibility("default"))) aclError fail(aclError code, const std::string& message);

}  // namespace emulator

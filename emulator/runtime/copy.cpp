// Copies and fills, on a stream or at once, at the speed of the link they cross.
#include "link.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace emulator {

void Link::move(void* destination, const void* source, size_t nbytes) {
  const double rate = bytes_per_s_;
  if (rate <= 0) {
    std::memcpy(destination, source, nbytes);
    return;
  }
  const auto time_for = [rate](size_t bytes) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bytes / rate));
  };
  Clock::time_point start;
  {
    std::lock_guard lock(mutex_);
    start = std::max(Clock::now(), free_at_);
    free_at_ = start + time_for(nbytes);
  }
  // Each chunk lands when the wire would have delivered it, so that a reader or writer that does not wait meets a
  // copy that is half done, as on hardware.
  constexpr size_t chunk = 1 << 20;
  for (size_t done = 0; done < nbytes;) {
    const size_t now = std::min(chunk, nbytes - done);
    std::this_thread::sleep_until(start + time_for(done + now));
    std::memcpy(static_cast<char*>(destination) + done, static_cast<const char*>(source) + done, now);
    done += now;
  }
}

namespace {

struct Links {
  Link h2d{settings().h2d_bytes_per_s};
  Link d2h{settings().d2h_bytes_per_s};
  const std::atomic<double> unlimited{0};
  Link within{unlimited};  // one memory
};

struct Copy {
  const char* name;
  Link* link;
  bool pageable;  // one end is host memory that the runtime does not know
};

Copy plan(const void* destination, const void* source) {
  static auto* links = new Links;
  const Place to = Memory::get().place_of(destination);
  const Place from = Memory::get().place_of(source);
  const bool pageable = to == Place::pageable || from == Place::pageable;
  if (to == Place::device && from != Place::device) return {"copy_h2d", &links->h2d, pageable};
  if (to != Place::device && from == Place::device) return {"copy_d2h", &links->d2h, pageable};
  return {to == Place::device ? "copy_d2d" : "copy_h2h", &links->within, pageable};
}

}  // namespace
}  // namespace emulator

using namespace emulator;

ACL_EXPORT aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t nbytes, aclrtMemcpyKind) {
  if (nbytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpy: more bytes than the destination has");
  plan(to, from).link->move(to, from, nbytes);
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t nbytes, aclrtMemcpyKind,
                                     aclrtStream stream) {
  if (nbytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemcpyAsync: more bytes than the destination has");
  const Copy copy = plan(to, from);
  if (std::strcmp(copy.name, "copy_h2h") == 0) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtMemcpyAsync: host to host is not supported");
  }
  const auto move = [=] { copy.link->move(to, from, nbytes); };
  const aclError code = submit(stream, {copy.name, {{from, nbytes}}, {{to, nbytes}}, move});
  // CANN returns from an asynchronous copy of pageable memory only when it is done.
  return code == ACL_SUCCESS && copy.pageable ? aclrtSynchronizeStream(stream) : code;
}

ACL_EXPORT aclError aclrtMemset(void* to, size_t room, int32_t value, size_t nbytes) {
  if (nbytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemset: more bytes than the destination has");
  std::memset(to, value, nbytes);
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t nbytes, aclrtStream stream) {
  if (nbytes > room) return fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMemsetAsync: more bytes than the destination has");
  return submit(stream, {"memset", {}, {{to, nbytes}}, [=] { std::memset(to, value, nbytes); }});
}

// Copies and fills, on a stream or at once, at the speed of the link they cross.
#include "copy.h"

#include "captures.h"
#include "detector.h"
#include "device.h"
#include "fault.h"
#include "link.h"
#include "memory.h"
#include "settings.h"
#include "simulation.h"
#include "stream.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace emulator {

void Link::move(void* destination, const void* source, size_t nbytes) {
  const double rate = Simulation::on() ? 0 : bytes_per_s_.load();
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
  Unit unit;
  Link* link;
  Place to;
  Place from;

  bool pageable() const { return to == Place::pageable || from == Place::pageable; }
  // A fault of such copies, by what is wrong: "late" is "late_h2d" for a copy to the device.
  bool is(const char* wrong) const { return misbehaves(wrong + std::string(std::strchr(name, '_'))); }
  bool freed() const { return to == Place::freed || from == Place::freed; }
  // In a dry run nothing comes from the device but zeros, and nothing goes there.
  void move(void* destination, const void* source, size_t nbytes) const {
    if (!settings().dry || on_host()) {
      link->move(destination, source, nbytes);
    } else if (to != Place::device) {
      Memory::get().blank(destination, nbytes);
    }
  }

  bool on_host() const { return to != Place::device && from != Place::device; }

  // Within one memory each byte is read and written there.
  Work work(size_t nbytes) const {
    return {.unit = unit, .nbytes = (is_link(unit) ? 1.0 : 2.0) * nbytes, .pageable = is_link(unit) && pageable()};
  }
};

// Bytes that are under way although their streams have gone on, because that was asked for.
class LateBytes {
 public:
  static LateBytes& all() {
    static auto* late = new LateBytes;  // never destroyed: see Streams
    return *late;
  }

  void add(std::function<void()> move) {
    std::lock_guard lock(mutex_);
    moves_.push_back(std::move(move));
  }

  void land() {
    std::vector<std::function<void()>> moves;
    {
      std::lock_guard lock(mutex_);
      moves.swap(moves_);
    }
    for (const auto& move : moves) move();
  }

 private:
  std::mutex mutex_;
  std::vector<std::function<void()>> moves_;
};

Copy plan(const void* destination, const void* source) {
  static auto* links = new Links;
  const Place to = Memory::get().place_of(destination);
  const Place from = Memory::get().place_of(source);
  if (to == Place::device && from != Place::device) return {"copy_h2d", Unit::h2d, &links->h2d, to, from};
  if (to != Place::device && from == Place::device) return {"copy_d2h", Unit::d2h, &links->d2h, to, from};
  return {to == Place::device ? "copy_d2d" : "copy_h2h", Unit::vector, &links->within, to, from};
}

// Of pageable memory the runtime learns neither when it comes nor when it goes; its copies wait for their end.
std::vector<Range> watched(Place place, const void* begin, size_t nbytes) {
  if (place == Place::pageable) return {};
  return {{begin, nbytes}};
}

void fill(void* to, int32_t value, size_t nbytes) {
  if (settings().dry && Memory::get().place_of(to) == Place::device) return;
  std::memset(to, value, nbytes);
}

aclError too_small(const char* function) {
  return fail(ACL_ERROR_RT_PARAM_INVALID, std::string(function) + ": more bytes than the destination has");
}

aclError use_after_free(const char* function) {
  return fail(ACL_ERROR_RT_PARAM_INVALID, std::string(function) + ": memory that was freed");
}

}  // namespace

aclError copy_now(const char* function, void* to, size_t room, const void* from, size_t nbytes, bool own_call) {
  if (nbytes > room) return too_small(function);
  if (const aclError code = Captures::get().refuse_waiting(function); code != ACL_SUCCESS) return code;
  const Copy copy = plan(to, from);
  if (copy.freed()) return use_after_free(function);
  if (Detector::on()) {
    Detector& detector = Detector::get();
    const int site = detector.site();
    for (const Range& range : watched(copy.from, from, nbytes)) {
      detector.host_uses(function, range, Touch::read, site);
    }
    for (const Range& range : watched(copy.to, to, nbytes)) {
      detector.host_uses(function, range, Touch::write, site);
    }
  }
  copy.move(to, from, nbytes);
  if (Simulation::on() && !copy.on_host()) Simulation::get().run_now(current_device(), copy.work(nbytes), own_call);
  return ACL_SUCCESS;
}

aclError copy_on_stream(const char* function, void* to, size_t room, const void* from, size_t nbytes,
                        aclrtStream stream, bool own_call) {
  if (nbytes > room) return too_small(function);
  const Copy copy = plan(to, from);
  if (copy.freed()) return use_after_free(function);
  if (copy.on_host()) {
    return fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, std::string(function) + ": host to host is not supported");
  }
  if (copy.pageable() && is_captured(stream)) {
    return fail(ACL_ERROR_RT_PARAM_INVALID, std::string(function) + ": a graph takes no copy of pageable memory");
  }
  std::function<void()> move = [=] { copy.move(to, from, nbytes); };
  if (copy.is("late")) move = [move] { LateBytes::all().add(move); };
  if (copy.is("endless")) move = until_faults_are_cleared();
  const aclError code =
      submit(stream, {.name = copy.name,
                      .reads = watched(copy.from, from, nbytes),
                      .writes = watched(copy.to, to, nbytes),
                      .body = move,
                      .work = copy.work(nbytes),
                      .own_call = own_call});
  // CANN returns from an asynchronous copy of pageable memory only when it is done.
  const bool waits = copy.is("blocking") || copy.pageable();
  return code == ACL_SUCCESS && waits ? aclrtSynchronizeStream(stream) : code;
}

void land_late_bytes() { LateBytes::all().land(); }

}  // namespace emulator

using namespace emulator;

ACL_EXPORT aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t nbytes, aclrtMemcpyKind) {
  const aclError code = fault("aclrtMemcpy");
  return code == ACL_SUCCESS ? copy_now("aclrtMemcpy", to, room, from, nbytes) : code;
}

ACL_EXPORT aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t nbytes, aclrtMemcpyKind,
                                     aclrtStream stream) {
  const aclError code = fault("aclrtMemcpyAsync");
  return code == ACL_SUCCESS ? copy_on_stream("aclrtMemcpyAsync", to, room, from, nbytes, stream) : code;
}

ACL_EXPORT aclError aclrtMemset(void* to, size_t room, int32_t value, size_t nbytes) {
  if (nbytes > room) return too_small("aclrtMemset");
  if (const aclError code = Captures::get().refuse_waiting("aclrtMemset"); code != ACL_SUCCESS) return code;
  const Place place = Memory::get().place_of(to);
  if (place == Place::freed) return use_after_free("aclrtMemset");
  if (Detector::on() && place != Place::pageable) {
    Detector& detector = Detector::get();
    detector.host_uses("aclrtMemset", {to, nbytes}, Touch::write, detector.site());
  }
  fill(to, value, nbytes);
  if (Simulation::on() && place == Place::device) {
    Simulation::get().run_now(current_device(), {.nbytes = static_cast<double>(nbytes)});
  }
  return ACL_SUCCESS;
}

ACL_EXPORT aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t nbytes, aclrtStream stream) {
  if (nbytes > room) return too_small("aclrtMemsetAsync");
  return submit(stream, {.name = "memset",
                         .reads = {},
                         .writes = {{to, nbytes}},
                         .body = [=] { fill(to, value, nbytes); },
                         .work = {.nbytes = static_cast<double>(nbytes)}});
}

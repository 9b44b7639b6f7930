#include "timeline.h"

#include "simulation.h"
#include "text.h"

namespace emulator {
namespace {

int64_t nanoseconds(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

Timeline& Timeline::get() {
  static auto* timeline = new Timeline;  // never destroyed: see Streams
  return *timeline;
}

Timeline::Entry::Entry(int device, int stream, const Operation& operation)
    : operation_(operation),
      device_(device),
      stream_(stream),
      kept_(Timeline::get().on_ && !Simulation::on()),
      start_(std::chrono::steady_clock::now()) {}

Timeline::Entry::~Entry() {
  if (!kept_) return;
  const auto end = std::chrono::steady_clock::now();
  Timeline::get().add(
      {operation_.name, device_, stream_, bytes_written(operation_), nanoseconds(start_), nanoseconds(end)});
}

void Timeline::add(Span span) {
  if (!on_) return;
  std::lock_guard lock(mutex_);
  spans_.push_back(std::move(span));
}

std::string Timeline::json() {
  std::lock_guard lock(mutex_);
  std::string text = "[";
  for (const Span& span : spans_) {
    if (text.size() > 1) text += ",\n";
    text += "[" + quoted(span.name) + "," + std::to_string(span.device) + "," + std::to_string(span.stream) + "," +
            std::to_string(span.nbytes) + "," + std::to_string(span.start) + "," + std::to_string(span.end) + "]";
  }
  return text + "]";
}

void Timeline::clear() {
  std::lock_guard lock(mutex_);
  spans_.clear();
}

}  // namespace emulator

using namespace emulator;

// For the Python package. Returns whether the timeline was kept before.
ACL_EXPORT int ascend_emulator_keep_timeline(int on) { return Timeline::get().keep(on != 0); }
ACL_EXPORT void ascend_emulator_clear_timeline() { Timeline::get().clear(); }
ACL_EXPORT char* ascend_emulator_timeline() {
  if (Simulation::on()) Simulation::get().now();  // what has ended by now is in it
  return give(Timeline::get().json());
}

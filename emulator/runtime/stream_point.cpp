#include "stream_point.h"

#include "schedule.h"
#include "stream.h"

namespace emulator {

void StreamPoint::place(std::weak_ptr<Stream> stream, uint64_t position, VectorClock known) {
  stream_ = std::move(stream);
  position_ = position;
  known_ = std::move(known);
}

void StreamPoint::reach(StreamError error) {
  {
    std::lock_guard lock(mutex_);
    reached_ = true;
    error_ = std::move(error);
    when_ = std::chrono::steady_clock::now();
  }
  changed_.notify_all();
}

void StreamPoint::ask() {
  // A stream that is gone has done its work.
  if (const auto stream = stream_.lock()) Schedule::get().need(*stream, position_);
}

void StreamPoint::wait() {
  ask();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

bool StreamPoint::reached() {
  std::lock_guard lock(mutex_);
  return reached_;
}

bool StreamPoint::asked() {
  if (const auto stream = stream_.lock()) Schedule::get().polled(*stream, position_);
  return reached();
}

StreamError StreamPoint::error() {
  std::lock_guard lock(mutex_);
  return error_;
}

StreamPoint::Time StreamPoint::when() {
  std::lock_guard lock(mutex_);
  return when_;
}

}  // namespace emulator

#include "schedule.h"

#include "settings.h"
#include "stream.h"

#include <chrono>
#include <limits>
#include <random>
#include <thread>

namespace emulator {
namespace {

// Every stream runs what it has, as a device with nothing else to do would.
class Eager : public Schedule {
 public:
  uint64_t initially_permitted() const override { return std::numeric_limits<uint64_t>::max(); }
  void submitted() override {}
  void need(Stream&, uint64_t) override {}
  void polled(Stream&, uint64_t) override {}
};

// A stream runs no operation before somebody waits for it, or for a later one of the same stream.
class Late : public Schedule {
 public:
  void submitted() override {}
  void need(Stream& stream, uint64_t position) override { stream.permit(position); }

  // No hardware is so late that a host which polls for ever would poll in vain.
  void polled(Stream& stream, uint64_t position) override {
    if (stream.count_poll() % kPatience == 0) stream.permit(position);
  }

 private:
  static constexpr uint64_t kPatience = 100;
};

// One operation at a time, of a stream drawn from those that can go on; only beside one that calls the program do others
// go on. Draws are made only where the host calls, so that a seed and a host program of one thread give one order.
class Random : public Schedule {
 public:
  explicit Random(uint64_t seed) : draw_(seed) {}

  void submitted() override {
    std::lock_guard lock(mutex_);
    // As many as are submitted, on average; but often none, and sometimes a burst.
    while (draw_() % 2 == 0 && step()) {
    }
  }

  void need(Stream& stream, uint64_t position) override {
    while (!stream.finished(position)) {
      if (const std::lock_guard lock(mutex_); step()) continue;
      // What there is waits for other processes, or for an operation that another thread has begun.
      Streams::all().demand();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  void polled(Stream&, uint64_t) override { submitted(); }

 private:
  bool step() {
    auto candidates = Streams::all().ready();
    if (candidates.empty()) return false;
    candidates[draw_() % candidates.size()]->run_one();
    return true;
  }

  std::mutex mutex_;
  std::mt19937_64 draw_;
};

Schedule* chosen() {
  switch (settings().schedule) {
    case Order::late: return new Late;
    case Order::random: return new Random(settings().seed);
    default: return new Eager;
  }
}

}  // namespace

Schedule& Schedule::get() {
  static Schedule* schedule = chosen();  // never destroyed: see Streams
  return *schedule;
}

}  // namespace emulator

// Modelled time: what time it is for the host, and when each operation begins and ends on the modelled machine.
//
// The host's time moves only by its own calls: each costs something, and a wait lasts until the end of what is waited
// for. What the host issues later begins later. So all that happens up to the host's time follows from what was issued
// by then, and is worked out when the host calls: from the order of its calls alone, never from when threads run.
//
// A stream's operations begin in order. One that needs an engine (of each device there are three: for computing, and
// for each direction of its link) waits there behind those that were ready before it. While both directions of the
// link move bytes, each is slower. The machine has one drive, which does one operation at a time, reads before writes.
#pragma once

#include "model.h"
#include "operation.h"

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace emulator {

class Simulation {
 public:
  // A stream, as far as time is concerned.
  class Lane;

  static bool on();
  static Simulation& get();

  std::shared_ptr<Lane> open(int device, int stream);
  void issue(const std::shared_ptr<Lane>& lane, const Operation& operation);
  // Work that the host waits for without a stream. own_call: see Operation.
  void run_now(int device, const Work& work, bool own_call = true);

  // The host hands a read or a write to the drive, which costs it nothing. The lane has no other operation.
  bool has_drive() const { return model_.has_drive(); }
  std::shared_ptr<Lane> use_drive(bool reads, size_t nbytes);
  // Takes it back. False if it has begun.
  bool cancel(Lane& lane);
  // When it began and ended, once it has ended.
  std::pair<Nanoseconds, Nanoseconds> times_of(const Lane& lane);

  // The host waits.
  void wait_for(const Lane& lane);
  bool wait_for(const Lane& lane, Nanoseconds at_most);  // whether it has come to pass
  void wait_for(const Mark& mark);
  void wait_for_device(int device);

  // Whether it has come to pass, asked by the host. That costs time, so whoever keeps asking gets there.
  bool asked(const Lane& lane);
  bool asked(const Mark& mark);

  // When it came to pass, or nothing if it has not. Costs nothing.
  std::optional<Nanoseconds> time_of(const Mark& mark);

  // The host's time; and what it was at the end of its last call.
  Nanoseconds now();
  Nanoseconds at_last_call();

 private:
  struct Task;
  struct Engine;
  struct Device;
  class Call;

  Simulation();
  void issue_at_host_time(const std::shared_ptr<Lane>& lane, Task task);
  void advance(Nanoseconds until);
  void step(Engine& ending);
  Engine* next_to_end();
  void begin_what_can();
  void begin_on_engines();
  void begin(Device& device, Engine& engine);
  void share_link(Device& device);
  template <class Done>
  void wait_until(Done done, Nanoseconds cost);

  const Model model_;
  std::mutex mutex_;
  Nanoseconds host_ = 0;
  Nanoseconds time_ = 0;  // up to which all is worked out; at most the host's, but for a moment in a wait
  uint64_t issued_ = 0;
  std::vector<std::shared_ptr<Lane>> busy_;  // the lanes that have tasks
  std::map<int, Device> devices_;
};

}  // namespace emulator

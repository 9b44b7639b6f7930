// Modelled time: what time it is for the host, and when each operation begins and ends on the modelled machine.
//
// The host's time moves only by its own calls: each costs something, and a wait lasts until the end of what is waited
// for. What the host issues later begins later. So all that happens up to the host's time follows from what was issued
// by then, and is worked out when the host calls: from the order of its calls alone, never from when threads run.
// ModelledDevices works out the devices' part.
#pragma once

#include "modelled_devices.h"

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

namespace emulator {

class Simulation {
 public:
  // A stream, as far as time is concerned.
  using Lane = ModelledDevices::Lane;

  static bool on();
  static Simulation& get();

  std::shared_ptr<Lane> open(int device, int stream);
  void issue(const std::shared_ptr<Lane>& lane, const Operation& operation);
  // An operation is put into a graph, which costs the host as much.
  void capture(const Operation& operation);
  // A graph is replayed, which costs it as much as one kernel. Its operations then cost nothing.
  void replay();
  // Work that the host waits for without a stream. own_call: see Operation.
  void run_now(int device, const Work& work, bool own_call = true);

  // The host hands a read or a write to a drive, counted from 0, which costs it nothing. The lane has no other operation.
  bool has_drive() const { return model_.has_drive(); }
  std::shared_ptr<Lane> use_drive(int drive, bool reads, size_t nbytes);
  // Takes it back. False if it has begun.
  bool cancel(Lane& lane);
  // When it began and ended, once it has ended.
  std::pair<Nanoseconds, Nanoseconds> times_of(const Lane& lane);

  // torch calls an operator, of whatever kind. Its cost is part of the host's next call.
  void begin_operator();

  // What other ranks have told may allow to foresee more.
  void go_on();

  // The host waits.
  void wait_for(const Lane& lane);
  bool wait_for(const Lane& lane, Nanoseconds at_most);  // whether it has come to pass
  void wait_for(const StreamPoint& point);
  void wait_for_device(int device);

  // Whether it has come to pass, asked by the host. That costs time, so whoever keeps asking gets there.
  bool asked(const Lane& lane);
  bool asked(const StreamPoint& point);

  // When it came to pass, or nothing if it has not. Costs nothing.
  std::optional<Nanoseconds> time_of(const StreamPoint& point);

  // The host's time; and what it was at the end of its last call.
  Nanoseconds now();
  Nanoseconds at_last_call();

 private:
  class Call;

  Simulation();
  void issue_at_host_time(const std::shared_ptr<Lane>& lane, ModelledDevices::Task task);
  template <class Done>
  void wait_until(Call& call, Done done, Nanoseconds cost);

  const Model model_;
  std::mutex mutex_;
  Nanoseconds host_ = 0;
  int64_t operators_ = 0;  // since the last call
  uint64_t issued_ = 0;
  ModelledDevices devices_{model_};
};

}  // namespace emulator

// A thread that makes this process's streams do what other ranks wait for, as a device does by itself: where the
// schedule runs nothing unasked, and where time is modelled.
#pragma once

#include "board.h"

#include "../runtime/peers.h"

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace emulator::hccl {

class Attendant {
 public:
  explicit Attendant(Board& board);
  ~Attendant();
  Attendant(const Attendant&) = delete;
  Attendant& operator=(const Attendant&) = delete;

  // Whoever wants that step of the party wants the stream to come to the point.
  void promise(const Party& party, uint64_t step, std::shared_ptr<StreamPoint> point);

 private:
  struct Promise {
    const Party* party;
    uint64_t step;
    std::shared_ptr<StreamPoint> point;
  };

  void run();
  std::deque<std::shared_ptr<StreamPoint>> due();

  Board& board_;
  std::mutex mutex_;
  std::deque<Promise> promises_;
  std::atomic<bool> closing_{false};
  std::thread thread_;
};

}  // namespace emulator::hccl

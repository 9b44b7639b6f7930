// A stream: operations run in order, one after the other, on a thread of their own, when the schedule permits. In a dry
// run they are done with as they are put on it.
#pragma once

#include "stream_point.h"
#include "operation.h"
#include "simulation.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace emulator {

class Graph;

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  explicit Stream(int device);
  ~Stream();  // waits for what is queued
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // site: where the program was; see Detector.
  void push(Operation operation, int site);
  StreamError synchronize();  // waits for what is queued by now, not for what others push meanwhile
  void drain();               // the same, and modelled time does not move; tells no error
  StreamError told();         // what went wrong so far; of what was refused it tells once
  bool idle();                // asked by the host; the schedule hears of it
  int id() const { return id_; }
  int device() const { return device_; }

  // The graph that is captured on this stream now; empty where it runs what it has.
  std::shared_ptr<Graph> capture();
  void enter(const std::shared_ptr<Graph>& capture);

  // For the schedule. Operations are numbered from 1.
  void permit(uint64_t position);
  bool finished(uint64_t position);
  bool busy();
  bool ready();    // has an operation that waits for no other stream, and for no other process
  void demand();   // asks other processes for what its next operation waits for
  void run_one();  // and comes back when it is done
  uint64_t count_poll();

 private:
  void run();
  void run_now(Operation& operation);
  void execute(Operation& operation);
  void take_over(const StreamError& error);
  StreamError error();

  const int id_;
  const int device_;
  const size_t slot_;  // in the race detector's clocks
  const std::shared_ptr<Simulation::Lane> lane_;  // null where time is not modelled
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::condition_variable finished_;
  std::weak_ptr<Graph> capture_;
  std::deque<Operation> queue_;
  uint64_t pushed_ = 0;
  uint64_t permitted_;
  uint64_t done_ = 0;
  uint64_t polls_ = 0;
  bool closing_ = false;
  StreamError error_;
  StreamError refused_;  // the first that was not told yet
  std::thread thread_;  // none in a dry run: there is nothing to do that would take time
};

// All streams of all devices. Never destroyed: torch still frees memory while the process exits. A stream is shared
// with each call that is under way on it, for another thread may destroy it meanwhile.
class Streams {
 public:
  static Streams& all();

  std::shared_ptr<Stream> make(int device);
  // nullptr is the default stream of the current device; empty if there is none such.
  std::shared_ptr<Stream> find(aclrtStream handle);
  void destroy(const std::shared_ptr<Stream>& stream);
  StreamError synchronize(int device);
  bool captures(int device);  // whether one of its streams is captured
  bool busy();
  std::vector<std::shared_ptr<Stream>> ready();
  void demand();

 private:
  std::vector<std::shared_ptr<Stream>> list();

  std::mutex mutex_;
  std::vector<std::shared_ptr<Stream>> streams_;
  std::vector<std::shared_ptr<Stream>> defaults_;  // by device
};

// Puts an operation at the end of a stream that is not captured. site: see Detector.
aclError issue(const std::shared_ptr<Stream>& stream, Operation operation, int site);

}  // namespace emulator

// A stream: operations run in order, one after the other, on a thread of their own.
#pragma once

#include "operation.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace emulator {

// The first thing that went wrong on a stream; told by every later synchronisation.
struct StreamError {
  aclError code = ACL_SUCCESS;
  std::string message;
};

class Stream {
 public:
  Stream();
  ~Stream();  // waits for what is queued
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void push(Operation operation);
  StreamError synchronize();  // waits for what is queued by now, not for what others push meanwhile
  bool idle();
  int id() const { return id_; }

 private:
  void run();
  void execute(Operation& operation);

  const int id_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::condition_variable finished_;
  std::deque<Operation> queue_;
  uint64_t pushed_ = 0;
  uint64_t done_ = 0;
  bool closing_ = false;
  StreamError error_;
  std::thread thread_;
};

// All streams of the device. Never destroyed: torch still frees memory while the process exits. A stream is shared
// with each call that is under way on it, for another thread may destroy it meanwhile.
class Streams {
 public:
  static Streams& all();

  aclrtStream create();
  std::shared_ptr<Stream> find(aclrtStream handle);  // nullptr is the default stream; empty if there is none such
  void destroy(const std::shared_ptr<Stream>& stream);
  StreamError synchronize();
  bool idle();

 private:
  std::vector<std::shared_ptr<Stream>> list();

  std::mutex mutex_;
  std::vector<std::shared_ptr<Stream>> streams_;
  std::shared_ptr<Stream> default_;
};

}  // namespace emulator

// A stream: operations run in order, one after the other, on a thread of their own.
#pragma once

#include "operation.h"

#include <condition_variable>
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
  StreamError synchronize();
  bool idle();
  int id() const { return id_; }

 private:
  void run();
  void execute(Operation& operation);

  const int id_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::condition_variable drained_;
  std::deque<Operation> queue_;
  bool busy_ = false;
  bool closing_ = false;
  StreamError error_;
  std::thread thread_;
};

// All streams of the device. Never destroyed: torch still frees memory while the process exits.
class Streams {
 public:
  static Streams& all();

  Stream* create();
  void destroy(Stream* stream);
  Stream* find(aclrtStream handle);  // nullptr is the default stream
  StreamError synchronize();
  bool idle();

 private:
  std::vector<Stream*> list();

  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;
  Stream* default_ = nullptr;
};

}  // namespace emulator

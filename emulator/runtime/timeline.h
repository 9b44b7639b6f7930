// What ran when: one span for each operation that took time, kept while the timeline is switched on.
#pragma once

#include "operation.h"

#include <atomic>
#include <chrono>
#include <mutex>

namespace emulator {

class Timeline {
 public:
  static Timeline& get();

  bool keep(bool on) { return on_.exchange(on); }  // whether it was kept before
  std::string json();  // a list of [name, device, stream, bytes written, start, end]
  void clear();

  struct Span {
    std::string name;
    int device;
    int stream;
    size_t nbytes;
    int64_t start;  // in ns of the steady clock, or of modelled time
    int64_t end;
  };
  void add(Span span);  // does nothing while the timeline is switched off

  // Lives while the operation runs, and makes a span of that where time is not modelled.
  class Entry {
   public:
    Entry(int device, int stream, const Operation& operation);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

   private:
    const Operation& operation_;
    const int device_;
    const int stream_;
    const bool kept_;
    const std::chrono::steady_clock::time_point start_;
  };

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::vector<Span> spans_;
};

}  // namespace emulator

// The modelled machine: how long work takes on it, and what its host's calls cost. The figures are those of a chip
// file and a server file, which the Python package has read and checked. Times are whole nanoseconds.
#pragma once

#include "work.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace emulator {

class Model {
 public:
  // figures: "memory.share=0.8;matrix.shares=2048:0.75,4096:0.86;..."
  explicit Model(const std::string& figures);

  // A kernel, a fill, or a copy within the device.
  Nanoseconds kernel(const Work& work) const;

  // A copy over the link: what it takes before bytes flow, and bytes per nanosecond with the other direction idle.
  Nanoseconds latency() const { return latency_; }
  double link_rate(const Work& work) const;
  // What a direction keeps of that while the other one is busy.
  double share_beside(Unit direction) const;
  // What the host's memory gives all copies of all cards together, per nanosecond; 0 where that is no limit.
  double host_memory() const;

  // Whether the server's drives are known, and how long they take to read or write.
  bool has_drive() const { return drive_read_ > 0; }
  Nanoseconds drive(const Work& work) const;
  // An operation of several ranks, once all are there.
  Nanoseconds ring(const Work& work) const;

  // What the host spends on putting a kernel or copy, and an event's record or wait, on a stream; on asking whether
  // something has passed; and on a wait, beyond the end of what is waited for.
  Nanoseconds issue() const { return issue_; }
  Nanoseconds event() const { return event_; }
  Nanoseconds query() const { return query_; }
  Nanoseconds wait() const { return wait_; }
  // What it spends on an operator of torch that launches nothing: a view, or one that calls others.
  Nanoseconds torch_operator() const { return operator_; }

 private:
  using Shares = std::vector<std::pair<double, double>>;  // the first numbers rise

  double number(const std::string& key) const;
  double number_or_0(const std::string& key) const;
  Nanoseconds microseconds(const std::string& key) const;
  Shares shares(const std::string& key) const;
  static double share(const Shares& shares, double size);
  double flops_per_ns(const Work& work) const;

  std::map<std::string, std::string> figures_;
  const Nanoseconds matrix_launch_;
  const Nanoseconds vector_launch_;
  const double bytes_per_ns_;  // of a kernel other than a softmax
  const double softmax_bytes_per_ns_;
  const double bfloat16_, float16_, float32_;  // FLOPs per ns of the matrix unit, at its peak
  const double convolution_share_;
  const double step_factor_;
  const Nanoseconds latency_, issue_, event_, query_, wait_, operator_;
  const double h2d_, d2h_;  // bytes per ns
  const double host_memory_;  // bytes per ns; 0 where nothing is known
  const double ring_, pair_;  // bytes per ns
  const Nanoseconds ring_start_;
  const double h2d_beside_d2h_, d2h_beside_h2d_, pageable_share_;
  const Nanoseconds drive_latency_;
  const double drive_read_, drive_write_;  // bytes per ns; 0 where no drive is known
  const Shares matmul_shares_;     // by the least dimension
  const Shares attention_shares_;  // by the size of a head
};

}  // namespace emulator

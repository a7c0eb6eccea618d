// How long steps and prompts take, and from that how much other work fits between two tokens of running answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace longkv::server {

class Pace {
 public:
  // share: other work between two decode steps, in decode steps; slots: in a step, at most.
  Pace(double share, size_t slots) : share_(share), steps_(slots) {}

  // A decode step of so many slots. `beside`: prompts are being read, which leaves the caches full of other things.
  void step(size_t slots, double seconds, bool beside);
  // Prompt tokens passed a layer.
  void piece(int64_t tokens, double seconds);

  // Seconds of a decode step of as many slots as the last one had, with nothing else to do; 0: there was none yet.
  // Steps beside prompts stand for it where there were no others. While a prompt is read it stays what it was before,
  // although the answers beside it grow.
  double ordinary_step() const;
  // Of a prompt token in one layer; 0: not known yet.
  double token_seconds() const { return token_seconds_; }
  // Seconds of other work in a turn with running answers.
  double budget() const { return share_ * ordinary_step(); }
  // Whether a turn has taken so long already, `seconds` since its tokens were told, that other work of `least` seconds
  // is left to the next one. A few times in a row at most, or prompts would starve beside a long answer.
  bool late(double seconds, double least);

 private:
  // Seconds of decode steps.
  struct StepSeconds {
    double alone = 0, beside = 0;
  };
  double share_;
  std::vector<StepSeconds> steps_;  // by the number of slots in a step, from 1
  size_t last_ = 0;                 // slots of the last step
  double token_seconds_ = 0;
  int late_ = 0;  // turns in a row
};

}  // namespace longkv::server

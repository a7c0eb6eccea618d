// Runs the built program as a user does, and judges how it ended.
#pragma once

#include <gtest/gtest.h>

#include <csignal>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace longkv::test {

using Args = std::vector<std::string>;

struct Outcome {
  int exit_code = -1;  // -1: ended by a signal
  int signal = 0;
  std::string out, err;
  double seconds = 0;  // from the signal that was sent, else from the start
};

struct ProgramInput {
  std::string text;              // standard input
  bool keep_open = false;        // standard input does not end after it
  bool terminal = false;         // standard input and error are a terminal, which hands on every byte as it comes
  std::string out_path;          // standard output goes there instead of into Outcome::out
  bool close_out = false;        // standard output is closed
  bool close_out_early = false;  // standard output is a pipe whose reader leaves after the first byte
  int64_t file_limit = -1;       // bytes that a file may have (RLIMIT_FSIZE)
  int64_t memory_limit = -1;     // bytes of address space (RLIMIT_AS)
  Args environment;              // NAME=VALUE, added
  std::function<bool(const Outcome&)> signal_when;  // once this holds for what was printed so far ...
  int signal = SIGINT;                              // ... this signal is sent, once
  int ignored_signal = 0;                           // as nohup does with SIGHUP
};

// Starts the program and waits for its end; after 200 s it is killed. It finds no card, so that a machine with one
// gives the same results as all others.
Outcome longkv_program(const Args& args, const ProgramInput& input = {});

Args join(Args args, std::initializer_list<std::string> more);

// The program ended by itself with this code, said so in one message on standard error that has `message`, and printed
// nothing.
::testing::AssertionResult refuses(const Outcome& outcome, int code, const std::string& message);
// The program ended well.
::testing::AssertionResult succeeds(const Outcome& outcome);
// Standard output as one JSON document; a failure of the test and null where it is not.
nlohmann::json parsed(const Outcome& outcome);
// Every line of standard output as a JSON document.
std::vector<nlohmann::json> parsed_lines(const Outcome& outcome);

std::string file_bytes(const std::string& path);

}  // namespace longkv::test

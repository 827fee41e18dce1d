// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

/// What a test body is to do in this process: nothing set in the process that CTest started, a name
/// in those that the test itself started. These end with their parent, whatever happens to it.
inline std::optional<std::string> child_role() {
  const char* const role = std::getenv("TORCHAMP_TEST_ROLE");
  if (!role) return std::nullopt;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() == 1) _exit(1);  // the parent has ended before
  return role;
}

/// Skips a test of processes that exceed a limit of the kernel's: QEMU does not end these.
#define SKIP_UNDER_AN_EMULATOR() \
  if (std::getenv("TORCHAMP_TEST_EMULATOR")) GTEST_SKIP() << "an emulator hangs at such a signal"

/// The running test's body in a separate process, in which child_role() is `role`. Killed and
/// reaped at the end, if it has not ended by then.
class ChildProcess {
 public:
  ChildProcess(const std::string& role, std::map<std::string, std::string> environment) {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    std::vector<std::string> arguments = program();
    arguments.insert(arguments.end(),
                     {std::string("--gtest_filter=") + test->test_suite_name() + "." + test->name(),
                      "--gtest_brief=1"});
    environment["TORCHAMP_TEST_ROLE"] = role;
    environment["OMP_NUM_THREADS"] = "1";
    std::vector<std::string> variables;
    for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
    for (char** variable = environ; *variable; ++variable) {
      const std::string text = *variable;
      if (!environment.contains(text.substr(0, text.find('=')))) variables.push_back(text);
    }
    const int error = posix_spawnp(&id_, arguments.front().c_str(), nullptr, nullptr,
                                   pointers(arguments).data(), pointers(variables).data());
    if (error != 0) ADD_FAILURE() << "posix_spawn failed: " << error;
  }
  ChildProcess(ChildProcess&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ChildProcess& operator=(ChildProcess&&) = delete;
  ~ChildProcess() {
    if (id_ <= 0) return;
    kill();
    wait();
  }

  void kill() const { ::kill(id_, SIGKILL); }

  /// Waits for its end: 0 for success, -N for signal N. Kills it after `limit`, a failure.
  int wait(std::chrono::seconds limit = std::chrono::seconds(120)) {
    const auto end = std::chrono::steady_clock::now() + limit;
    int status = 0;
    while (waitpid(id_, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > end) {
        ADD_FAILURE() << "a process of the test has not ended in time";
        kill();
        waitpid(id_, &status, 0);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    id_ = -1;
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  }

 private:
  /// This program, behind the words of TORCHAMP_TEST_EMULATOR: the kernel runs no other processor's
  /// programs by itself.
  static std::vector<std::string> program() {
    std::vector<std::string> words;
    const char* const emulator = std::getenv("TORCHAMP_TEST_EMULATOR");
    std::istringstream text(emulator ? emulator : "");
    for (std::string word; text >> word;) words.push_back(word);
    words.push_back(words.empty() ? "/proc/self/exe"
                                  : std::filesystem::read_symlink("/proc/self/exe").string());
    return words;
  }
  static std::vector<char*> pointers(std::vector<std::string>& strings) {
    std::vector<char*> result;
    for (std::string& string : strings) result.push_back(string.data());
    result.push_back(nullptr);
    return result;
  }

  pid_t id_ = -1;
};

// A rollout server: keeps the newest version in its memory, until it has the one that it is told to end with.
//
//   serve 127.0.0.1:7070 step_3
#include <deltasync/receiver.hpp>

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>

using namespace deltasync;

namespace {

Status serve(const std::string& endpoint, const std::string& last_label) {
  const auto minute = [] { return CallOptions::within(std::chrono::minutes(1)); };

  DS_ASSIGN(const auto receiver, Receiver::connect({.endpoint = endpoint}, minute()));
  DS_TRY(receiver->bind(make_host_target(receiver->layout()), minute()));
  do {
    DS_ASSIGN(const auto update, receiver->pull({.newer = true}, minute()));
    DS_TRY(update->commit(minute()));
    const PullReport& report = update->report();
    std::printf("%s: %llu of %llu bytes\n", report.version.label.c_str(),
                static_cast<unsigned long long>(report.wire_bytes), static_cast<unsigned long long>(report.full_bytes));
  } while (receiver->current()->label != last_label);

  const std::span<const std::byte> memory = host_target_memory(*receiver->target());
  for (const Tensor& tensor : receiver->layout()->tensors()) {
    float first[4];
    std::memcpy(first, memory.data() + tensor.offset, sizeof first);
    std::printf("%s begins with %g %g %g %g\n", tensor.spec.name.c_str(), first[0], first[1], first[2], first[3]);
  }
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: serve HOST:PORT LABEL\n"), 2;
  const Status done = serve(argv[1], argv[2]);
  if (!done) return std::fprintf(stderr, "serve: %s\n", done.error().to_string().c_str()), 1;
}

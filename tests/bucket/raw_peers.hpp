// Ends of a bucket channel that say and answer what a test has them, and nothing by themselves.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include "delta/delta.hpp"
#include "format/packed_layout.hpp"
#include "format/wire_bucket.hpp"
#include "net/channel.hpp"
#include "net/unix_listener.hpp"
#include "tests/bucket/channel_fixture.hpp"

namespace deltasync::test {

/// Says what the test has it say.
class RawTrainer {
 public:
  explicit RawTrainer(const LayoutPtr& layout) : layout_(layout) {
    hello.half_bytes = kBucketBytes;
    hello.name = "raw";
    hello.tensors = {{0, layout->tensors().size()}};
    hello.layout = wire::pack_layout(layout->encode(), {}).value();
    memory = bucket::make_host_buckets(kBucketBytes).value();
  }
  /// What the engine answers to the hello with this descriptor.
  Status connect(const std::string& path, int descriptor) {
    DS_TRY(reach(path));
    return greet(descriptor);
  }
  /// Without a word yet.
  Status reach(const std::string& path) {
    for (;;) {
      auto fd = net::connect_unix(path, soon());
      if (!fd && fd.error().code() == Errc::connection) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        continue;
      }
      if (!fd) return std::move(fd).error();
      socket = net::MessageSocket(std::move(*fd));
      return {};
    }
  }
  Status greet(int descriptor) {
    const Deadline end = soon().deadline();
    if (descriptor < 0) {
      DS_TRY(socket.send(1, hello, end));
    } else {
      DS_TRY(socket.send_with_file(wire::Type::bucket_hello, 1, hello.encode(), descriptor, end));
    }
    return heard(1);
  }
  /// Something happens while its hello is on its way.
  Status greet_around(const std::function<void()>& amid) {
    const std::vector<std::byte> payload = hello.encode();
    const wire::Header header = wire::make_header(wire::Type::bucket_hello, 1, payload);
    EXPECT_EQ(::send(socket.fd(), &header, 20, MSG_NOSIGNAL), 20);
    amid();
    const auto* const rest = reinterpret_cast<const std::byte*>(&header) + 20;
    const ByteSpan left(rest, sizeof header - 20);
    EXPECT_EQ(net::send_with_file(socket.fd(), left, memory->descriptor()), static_cast<ssize_t>(left.size()));
    EXPECT_EQ(::send(socket.fd(), payload.data(), payload.size(), MSG_NOSIGNAL), static_cast<ssize_t>(payload.size()));
    return heard(1);
  }
  /// The first bytes of a message, and no more.
  void say_a_part(wire::Type type) const {
    const wire::Header header = wire::make_header(type, 9, {});
    EXPECT_EQ(::send(socket.fd(), &header, 20, MSG_NOSIGNAL), 20);
  }
  Status connect(const std::string& path) { return connect(path, memory->descriptor()); }
  Status heard(std::uint64_t of) {
    auto answer = socket.recv_answer(of, wire::Type::end, soon().deadline());
    return answer ? Status() : Status(std::move(answer).error());
  }
  template <class M>
  Status say(const M& message) {
    DS_TRY(socket.send(++request, message, soon().deadline()));
    return heard(request);
  }
  /// Tensor 0 with its bytes, in half 0.
  wire::BucketChunk first_chunk(const std::vector<std::byte>& half) const {
    const Tensor& tensor = layout_->tensors()[0];
    std::copy_n(half.data() + tensor.offset, tensor.bytes, memory->room(0).data());
    wire::BucketChunk chunk{0, {{0, 0, 0}}, {}};
    for (std::uint64_t t = 0; t < tensor.tile_count; ++t) {
      chunk.digests.push_back(delta::tile_digest(*layout_, half, tensor.first_tile + t));
    }
    return chunk;
  }

  wire::BucketHello hello;
  std::unique_ptr<bucket::BucketMemory> memory;
  net::MessageSocket socket;
  std::uint64_t request = 1;

 private:
  const LayoutPtr layout_;
};

/// Accepts one trainer.
class RawEngine {
 public:
  explicit RawEngine(const std::string& path) : listener_(net::listen_unix(path).value()) {}
  void accept() {
    UniqueFd fd;
    while (!fd) {
      pollfd look{listener_.get(), POLLIN, 0};
      ::poll(&look, 1, 1000);
      fd.reset(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    }
    socket = net::MessageSocket(std::move(fd));
    socket.accept_files();
  }
  net::Message next() { return socket.recv(wire::kLayoutBytesMax, soon().deadline()).value(); }
  void answer(const net::Message& message) {
    ASSERT_TRUE(socket.send(wire::Type::end, message.header.request, {}, soon().deadline()).ok());
  }
  /// Whether it says something within this time.
  bool speaks(std::chrono::milliseconds within) const {
    pollfd look{socket.fd(), POLLIN, 0};
    return ::poll(&look, 1, static_cast<int>(within.count())) != 0;
  }

  net::MessageSocket socket;

 private:
  const UniqueFd listener_;
};

}  // namespace deltasync::test

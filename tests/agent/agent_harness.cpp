#include "tests/agent/agent_harness.hpp"

#include <spdlog/spdlog.h>
#include <sys/resource.h>

#include <cstring>

#include "base/deadline.hpp"
#include "format/packed_layout.hpp"

/// Tests wait for the agent's background threads, which get next to nothing of a machine that is busy with other tests.
/// Here no thread yields to others.
extern "C" int setpriority(__priority_which_t, id_t, int) noexcept {
  return 0;
}

namespace deltasync::agent {

Result<Client> Client::connect_raw(std::uint16_t port) {
  DS_ASSIGN(UniqueFd fd, net::connect_tcp("127.0.0.1", port, test_deadline()));
  Client client;
  client.socket = net::MessageSocket(std::move(fd));
  DS_ASSIGN(client.hello, client.socket.recv_as<wire::Hello>(wire::kHelloRequest, test_deadline()));
  return client;
}

Result<Client> Client::connect(std::uint16_t port, wire::Role role, const std::string& token, std::uint16_t protocol) {
  DS_ASSIGN(Client client, connect_raw(port));
  wire::Auth auth;
  auth.protocol = protocol;
  auth.role = role;
  auth.nonce = net::make_nonce();
  auth.proof = net::client_proof(token, client.hello.nonce, auth.nonce, role);
  auth.name = "test client";
  // An error that ends the connection answers request 0.
  DS_TRY(client.socket.send(0, auth, test_deadline()));
  DS_ASSIGN(client.welcome, client.socket.recv_as<wire::Welcome>(0, test_deadline()));
  if (!net::equal_proofs(client.welcome.proof, net::server_proof(token, auth.nonce, client.hello.nonce))) {
    return Error(Errc::unauthenticated, "the agent's own proof is wrong");
  }
  return client;
}

Status Client::release(std::uint64_t plan) {
  DS_TRY(socket.send(++request_, wire::Release{plan}, test_deadline()));
  DS_TRY(socket.recv_answer(request_, wire::Type::end, test_deadline()));
  return {};
}

Result<LayoutPtr> Client::layout() {
  DS_TRY(socket.send(wire::Type::get_layout, ++request_, {}, test_deadline()));
  DS_ASSIGN(const auto message, socket.recv_as<wire::LayoutMessage>(request_, test_deadline()));
  DS_ASSIGN(const auto unpacked, wire::unpack_layout(message));
  return unpacked.layout;
}

Result<std::vector<std::uint64_t>> Client::digests(std::uint64_t plan) {
  DS_TRY(socket.send(++request_, wire::GetDigests{plan}, test_deadline()));
  DS_ASSIGN(const auto message, socket.recv_answer(request_, wire::Type::digests, test_deadline()));
  std::vector<std::uint64_t> digests(message.payload.size() / 8);
  std::memcpy(digests.data(), message.payload.data(), digests.size() * 8);
  return digests;
}

Result<std::vector<std::byte>> Client::extent(std::uint64_t plan, wire::TileRange tiles) {
  DS_TRY(socket.send(++request_, wire::GetExtent{plan, tiles}, test_deadline()));
  std::vector<std::byte> bytes;
  for (;;) {
    DS_ASSIGN(const auto message, socket.recv(wire::kExtentBytesMax, test_deadline()));
    if (message.type() == wire::Type::end) return bytes;
    if (message.type() == wire::Type::error) {
      DS_ASSIGN(const auto error, wire::ErrorMessage::decode(message.payload));
      return Error(error.code, error.message);
    }
    if (message.type() != wire::Type::extent) return Error(Errc::protocol, "no extent");
    bytes.insert(bytes.end(), message.payload.begin(), message.payload.end());
  }
}

Result<std::vector<std::vector<std::byte>>> Client::collect_frames() {
  std::vector<std::vector<std::byte>> frames;
  for (;;) {
    DS_ASSIGN(auto message, socket.recv(wire::kFrameBytesMax, test_deadline()));
    if (message.header.request != request_) return Error(Errc::protocol, "an answer to another request");
    if (message.type() == wire::Type::end) return frames;
    if (message.type() == wire::Type::error) {
      DS_ASSIGN(const auto error, wire::ErrorMessage::decode(message.payload));
      return Error(error.code, error.message);
    }
    if (message.type() != wire::Type::frame) return Error(Errc::protocol, "no frame");
    frames.push_back(std::move(message.payload));
  }
}
Result<std::vector<std::vector<std::byte>>> Client::frames(const wire::GetFrames& message) {
  DS_TRY(socket.send(++request_, message, test_deadline()));
  return collect_frames();
}
Result<std::vector<std::vector<std::byte>>> Client::frames(const wire::GetRawTiles& message) {
  DS_TRY(socket.send(++request_, message, test_deadline()));
  return collect_frames();
}

AgentTest::AgentTest() {
  spdlog::set_level(spdlog::level::err);
  options_.core.name = "test";
  options_.core.shm_dir = dir_.path();
  options_.core.scrub.pass = {};  // what a test damages it wants to find itself
  options_.trainer.socket_path = (dir_.path() / "agent.sock").string();
}

AgentTest::~AgentTest() {
  writer_.reset();
  agent_.reset();
}

void AgentTest::start_agent() {
  auto agent = Agent::start(options_);
  ASSERT_TRUE(agent) << agent.error().to_string();
  agent_ = std::move(agent).value();
}

std::unique_ptr<Writer> AgentTest::attach(const LayoutPtr& layout) {
  WriterOptions options;
  options.agent_socket = options_.trainer.socket_path;
  options.threads = 1;
  auto writer = Writer::attach(layout, make_sidecar(*layout), options, test_deadline());
  if (!writer) {
    ADD_FAILURE() << writer.error().to_string();
    return nullptr;
  }
  return std::move(writer).value();
}

Result<OffloadReport> AgentTest::offload(Writer& writer, const std::vector<std::byte>& half, std::uint64_t number,
                                         Deadline deadline, bool wait_served) {
  std::vector<std::pair<std::string, Source>> tensors;
  for (const Tensor& tensor : writer.layout()->tensors()) {
    tensors.emplace_back(tensor.spec.name, Source{half.data() + tensor.offset});
  }
  const Version version{{epoch_, number}, "step_" + std::to_string(number)};
  DS_ASSIGN(const OffloadReport report, writer.offload(version, tensors, deadline));
  if (wait_served) DS_TRY(writer.wait_ready(version.id, deadline));
  return report;
}

void AgentTest::next_version(double density) {
  if (!writer_) writer_ = attach(model_.layout);
  ASSERT_NE(writer_, nullptr);
  if (number_ > 0) test::mutate(model_.half, *model_.layout, density, number_);
  const auto report = offload(*writer_, model_.half, ++number_);
  ASSERT_TRUE(report) << report.error().to_string();
}

Client AgentTest::client(wire::Role role) {
  auto client = Client::connect(port(), role, options_.pull.token);
  if (!client) {
    ADD_FAILURE() << client.error().to_string();
    return {};
  }
  return std::move(client).value();
}

wire::PlanRequest AgentTest::ask(wire::WantKind want) const {
  wire::PlanRequest plan;
  plan.layout = model_.layout->digest();
  plan.want = want;
  return plan;
}

wire::PlanRequest AgentTest::ask_from_served() const {
  wire::PlanRequest plan = ask();
  plan.base = served()->version.id;
  plan.base_root = served()->root;
  return plan;
}

}  // namespace deltasync::agent

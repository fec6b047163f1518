// Where a token lies that an agent made for itself, and who finds it.
#include "net/local_token.hpp"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <arpa/inet.h>

#include <cstdlib>
#include <optional>

#include "base/runtime_dir.hpp"
#include "net/auth.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::net {
namespace {

constexpr uid_t kNobody = 65534;

/// A connection to a listener on a loopback address, which is this process's, too.
struct Connected {
  UniqueFd listener;
  UniqueFd connection;
  Endpoint at;

  explicit Connected(const char* host = "127.0.0.1") {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    ::inet_pton(AF_INET, host, &address.sin_addr);
    socklen_t size = sizeof address;
    listener.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    connection.reset(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    auto* raw = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(listener.get(), raw, size), 0);
    EXPECT_EQ(::listen(listener.get(), 1), 0);
    EXPECT_EQ(::getsockname(listener.get(), raw, &size), 0);
    EXPECT_EQ(::connect(connection.get(), raw, size), 0);
    at = {host, ntohs(address.sin_port)};
  }
};

class LocalTokenTest : public ::testing::Test {
 protected:
  LocalTokenTest() { ::setenv("XDG_RUNTIME_DIR", dir_.path().c_str(), 1); }
  ~LocalTokenTest() override { ::unsetenv("XDG_RUNTIME_DIR"); }
  std::filesystem::path own() const { return dir_.path() / "deltasync"; }

  test::TempDir dir_;
};

TEST_F(LocalTokenTest, IsFoundByAPeerThatIsConnectedToWhereItsOwnerListens) {
  const Connected here;
  const Connected other("127.0.0.2");
  std::string token = make_token();
  EXPECT_TRUE(check_token(token));
  EXPECT_NE(token, make_token());
  std::optional<LocalToken> lies = LocalToken::publish(here.at, token).value();
  EXPECT_EQ(lies->file().parent_path(), own());
  struct stat found {};
  ASSERT_EQ(::stat(lies->file().c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777u, 0600u);
  EXPECT_EQ(find_local_token(here.connection.get()).value(), token);
  EXPECT_EQ(find_local_token(other.connection.get()).value(), "");
  const auto file = lies->file();
  lies.reset();
  EXPECT_FALSE(std::filesystem::exists(file));
  EXPECT_EQ(find_local_token(here.connection.get()).value(), "");
}

TEST_F(LocalTokenTest, OfADeadOwnerIsNotBelieved) {
  const Connected here;
  const pid_t child = ::fork();
  if (child == 0) {
    const auto lies = LocalToken::publish(here.at, make_token());
    ::_exit(lies.ok() ? 0 : 1);  // as SIGKILL does: nothing is taken away
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_FALSE(std::filesystem::is_empty(own()));
  EXPECT_EQ(find_local_token(here.connection.get()).value(), "");
  {
    const Connected elsewhere("127.0.0.2");  // any agent that starts removes it
    const auto other = LocalToken::publish(elsewhere.at, make_token());
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(own()), {}), 1);
  }
  const auto next = LocalToken::publish(here.at, "the next one there makes");
  EXPECT_EQ(find_local_token(here.connection.get()).value(), "the next one there makes");
}

TEST_F(LocalTokenTest, OfALiveOwnerIsNotReplaced) {
  const Connected here;
  const auto first = LocalToken::publish(here.at, "of the first of two").value();
  const auto second = LocalToken::publish(here.at, make_token());
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code(), Errc::already_exists);
  EXPECT_EQ(find_local_token(here.connection.get()).value(), "of the first of two");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(own()), {}), 1);
}

TEST_F(LocalTokenTest, ThatOthersMayReadIsAnError) {
  const Connected here;
  const auto lies = LocalToken::publish(here.at, make_token());
  ASSERT_TRUE(lies);
  ::chmod(lies->file().c_str(), 0644);
  const auto found = find_local_token(here.connection.get());
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code(), Errc::permission);
}

TEST_F(LocalTokenTest, IsFoundByAProgramOfAnotherEnvironment) {
  const Connected here;
  ::unsetenv("XDG_RUNTIME_DIR");
  const auto lies = LocalToken::publish(here.at, make_token());
  ASSERT_TRUE(lies) << lies.error().to_string();
  ::setenv("XDG_RUNTIME_DIR", dir_.path().c_str(), 1);
  EXPECT_NE(find_local_token(here.connection.get()).value(), "");
}

TEST_F(LocalTokenTest, OfAConnectionThatHasEndedIsNotCalledNone) {
  Connected here;
  const auto lies = LocalToken::publish(here.at, make_token());
  ASSERT_TRUE(lies) << lies.error().to_string();
  here.listener.reset();  // which resets what nobody has accepted
  const auto found = find_local_token(here.connection.get());
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code(), Errc::connection);
}

using RuntimeDir = LocalTokenTest;

TEST_F(RuntimeDir, IsMadeForThisUserAlone) {
  EXPECT_EQ(make_runtime_dir().value(), own());
  struct stat found {};
  ASSERT_EQ(::stat(own().c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777u, 0700u);
  EXPECT_EQ(make_runtime_dir().value(), own());
  EXPECT_EQ(find_runtime_dirs().front(), own());
}

TEST_F(RuntimeDir, ThatOthersMayEnterOrMadeIsNotUsed) {
  ASSERT_EQ(::mkdir(own().c_str(), 0755), 0);
  const auto next = make_runtime_dir();
  EXPECT_TRUE(!next || *next != own());
  for (const auto& found : find_runtime_dirs()) EXPECT_NE(found, own());
  if (::geteuid() != 0) GTEST_SKIP() << "giving a directory to another user needs root";
  ASSERT_EQ(::chmod(own().c_str(), 0700), 0);
  EXPECT_EQ(make_runtime_dir().value(), own());
  ASSERT_EQ(::chown(own().c_str(), kNobody, kNobody), 0);
  for (const auto& found : find_runtime_dirs()) EXPECT_NE(found, own());
}

TEST_F(RuntimeDir, DoesNotLieInAnothersDirectory) {
  if (::geteuid() != 0) GTEST_SKIP() << "giving a directory to another user needs root";
  ASSERT_EQ(::chown(dir_.path().c_str(), kNobody, kNobody), 0);
  const auto next = make_runtime_dir();
  EXPECT_TRUE(!next || *next != own());
  EXPECT_FALSE(std::filesystem::exists(own()));
}

TEST_F(RuntimeDir, ThatASquatterMadeFirstIsNamedWithItsOwner) {
  if (::geteuid() != 0) GTEST_SKIP() << "becoming another user needs root";
  // A user who has no directory but /tmp's, and another who was there first.
  constexpr uid_t kUser = 61237;
  const std::filesystem::path squatted = "/tmp/deltasync-" + std::to_string(kUser);
  ASSERT_EQ(::mkdir(squatted.c_str(), 0777), 0);
  ASSERT_EQ(::chown(squatted.c_str(), kNobody, kNobody), 0);
  ::unsetenv("XDG_RUNTIME_DIR");
  int said[2];
  ASSERT_EQ(::pipe(said), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setresuid(kUser, kUser, kUser) != 0) ::_exit(1);
    const auto made = make_runtime_dir();
    const std::string text = made ? "made " + made->string() : made.error().to_string();
    ::_exit(::write(said[1], text.data(), text.size()) > 0 ? 0 : 1);
  }
  ::waitpid(child, nullptr, 0);
  std::filesystem::remove(squatted);
  char text[512] = {};
  ASSERT_GT(::read(said[0], text, sizeof text - 1), 0);
  ::close(said[0]);
  ::close(said[1]);
  EXPECT_NE(std::string(text).find("belongs to user 65534"), std::string::npos) << text;
  EXPECT_NE(std::string(text).find("XDG_RUNTIME_DIR"), std::string::npos) << text;
}

}  // namespace
}  // namespace deltasync::net

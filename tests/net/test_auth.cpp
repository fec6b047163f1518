#include <grp.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "net/auth.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::net {
namespace {

Nonce counting(std::uint8_t from) {
  Nonce nonce{};
  for (auto& byte : nonce) byte = from++;
  return nonce;
}

std::string hex(const Proof& proof) {
  std::string text;
  for (const auto byte : proof) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

/// Made by Python's hmac module over the bytes that wire_protocol.md names.
TEST(Auth, ProofsAreThoseOfTheProtocolPage) {
  EXPECT_EQ(hex(client_proof("secret", counting(0), counting(100), wire::Role::data)),
            "fd2b69b1dd30ade185d813fa0b74ecd6a6fb4b379ba91d524c4330a6733a07e2");
  EXPECT_EQ(hex(server_proof("secret", counting(100), counting(0))),
            "7136fc676cacf26fa60ccb237c8fbfb7c72605e3b3a9ec194263ebdbf0536c71");
}

TEST(Auth, EveryInputChangesTheProof) {
  std::set<Proof> seen;
  const auto is_new = [&](const Proof& proof) { return seen.insert(proof).second; };
  EXPECT_TRUE(is_new(client_proof("secret", counting(0), counting(100), wire::Role::data)));
  EXPECT_TRUE(is_new(client_proof("secreT", counting(0), counting(100), wire::Role::data)));
  EXPECT_TRUE(is_new(client_proof("secret", counting(1), counting(100), wire::Role::data)));
  EXPECT_TRUE(is_new(client_proof("secret", counting(0), counting(101), wire::Role::data)));
  EXPECT_TRUE(is_new(client_proof("secret", counting(0), counting(100), wire::Role::control)));
  // A server's proof must not pass for a client's, nor one with the nonces swapped.
  EXPECT_TRUE(is_new(client_proof("secret", counting(100), counting(0), wire::Role::data)));
  EXPECT_TRUE(is_new(server_proof("secret", counting(0), counting(100))));
  EXPECT_TRUE(is_new(server_proof("secret", counting(100), counting(0))));
}

TEST(Auth, WithoutATokenProofsAreZero) {
  EXPECT_EQ(client_proof("", counting(0), counting(1), wire::Role::watch), Proof{});
  EXPECT_EQ(server_proof("", counting(0), counting(1)), Proof{});
}

TEST(Auth, ComparisonSeesEveryByte) {
  const Proof proof = counting(7);
  EXPECT_TRUE(equal_proofs(proof, counting(7)));
  for (std::size_t i = 0; i < proof.size(); ++i) {
    Proof other = proof;
    other[i] ^= 0x80;
    EXPECT_FALSE(equal_proofs(proof, other)) << i;
  }
}

TEST(Auth, NoncesAndIdsDiffer) {
  std::set<Nonce> nonces;
  std::set<std::uint64_t> ids;
  for (int i = 0; i < 64; ++i) {
    nonces.insert(make_nonce());
    ids.insert(make_random_id());
  }
  EXPECT_EQ(nonces.size(), 64u);
  EXPECT_EQ(ids.size(), 64u);
  EXPECT_EQ(ids.count(0), 0u);
}

class TokenFile : public ::testing::Test {
 protected:
  std::filesystem::path make(std::string_view content, mode_t mode) {
    dir_.write("token", content);
    const auto path = dir_.path() / "token";
    ::chmod(path.c_str(), mode);
    return path;
  }
  test::TempDir dir_;
};

TEST_F(TokenFile, IsTrimmed) {
  const auto token = read_token_file(make(" \t a tok en of 16 b\r\n\n", 0600));
  ASSERT_TRUE(token) << token.error().to_string();
  EXPECT_EQ(*token, "a tok en of 16 b");
}

TEST_F(TokenFile, MayBeReadOnly) {
  EXPECT_TRUE(read_token_file(make(std::string(kTokenBytesMin, 'x'), 0400)));
}

TEST_F(TokenFile, ThatOthersMayTouchIsRefused) {
  for (const mode_t mode : {0640, 0604, 0660, 0620, 0601, 0777}) {
    const auto token = read_token_file(make(std::string(kTokenBytesMin, 'x'), mode));
    ASSERT_FALSE(token) << std::oct << mode;
    EXPECT_EQ(token.error().code(), Errc::permission) << std::oct << mode;
    EXPECT_NE(token.error().message().find((dir_.path() / "token").string()), std::string::npos);
  }
}

TEST_F(TokenFile, OfRootMayBeReadByAGroup) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a file of root's";
  constexpr uid_t kNobody = 65534;
  const auto read_as_nobody = [&](mode_t mode) {
    const auto path = make(std::string(kTokenBytesMin, 'x'), mode);
    EXPECT_EQ(::chmod(dir_.path().c_str(), 0755), 0);
    EXPECT_EQ(::chown(path.c_str(), 0, kNobody), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      const bool changed = ::setgroups(0, nullptr) == 0 && ::setgid(kNobody) == 0 && ::setuid(kNobody) == 0;
      const auto token = read_token_file(path);
      ::_exit(!changed ? 100 : token ? 0 : token.error().code() == Errc::permission ? 1 : 2);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  for (const mode_t mode : {0440, 0640, 0040}) EXPECT_EQ(read_as_nobody(mode), 0) << std::oct << mode;
  for (const mode_t mode : {0460, 0450, 0444, 0642}) EXPECT_EQ(read_as_nobody(mode), 1) << std::oct << mode;
}

TEST_F(TokenFile, BadContentsAreRefused) {
  EXPECT_EQ(read_token_file(make("", 0600)).error().code(), Errc::invalid_argument);
  EXPECT_EQ(read_token_file(make(" \n\t", 0600)).error().code(), Errc::invalid_argument);
  EXPECT_EQ(read_token_file(make(std::string(kTokenFileBytesMax + 1, 'x'), 0600)).error().code(),
            Errc::invalid_argument);
  EXPECT_TRUE(read_token_file(make(std::string(kTokenFileBytesMax, 'x'), 0600)));
}

TEST_F(TokenFile, OfAGuessableLengthIsRefused) {
  const auto token = read_token_file(make(" " + std::string(kTokenBytesMin - 1, 'x') + "\n", 0600));
  ASSERT_FALSE(token);
  EXPECT_EQ(token.error().code(), Errc::invalid_argument);
  EXPECT_NE(token.error().message().find("15 bytes, at least 16"), std::string::npos) << token.error().message();
}

TEST_F(TokenFile, ThatIsNoFileIsRefused) {
  EXPECT_EQ(read_token_file(dir_.path() / "none").error().code(), Errc::not_found);
  EXPECT_EQ(read_token_file(dir_.path()).error().code(), Errc::invalid_argument);
}

}  // namespace
}  // namespace deltasync::net

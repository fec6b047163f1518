// When a certificate ends: what is said of it, and when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <thread>

#include "base/log.hpp"
#include "net/tls.hpp"
#include "net/tls_expiry.hpp"
#include "tests/support/certificates.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::net {
namespace {

using test::local_server;
using ::testing::HasSubstr;
using ::testing::Not;
using Say = ExpiryNotice::Say;
using std::chrono::hours;
using std::chrono::seconds;

constexpr hours kDay(24);

CertificateLife life_of(hours whole) {
  return {CertificateTime(), CertificateTime() + whole};
}

TEST(ExpiryNotice, SaysEachThingOnceForEachCertificate) {
  ExpiryNotice notice;
  const CertificateLife life = life_of(90 * kDay);
  EXPECT_EQ(notice.look(life, life.end - 15 * kDay), Say::nothing);
  EXPECT_EQ(notice.look(life, life.end - 14 * kDay), Say::soon);
  EXPECT_EQ(notice.look(life, life.end - 13 * kDay), Say::nothing);
  EXPECT_EQ(notice.look(life, life.end - kDay), Say::very_soon);
  EXPECT_EQ(notice.look(life, life.end - hours(1)), Say::nothing);
  EXPECT_EQ(notice.look(life, life.end), Say::over);
  EXPECT_EQ(notice.look(life, life.end + kDay), Say::nothing);
}

TEST(ExpiryNotice, IsSilentWhileOneThatIsRenewedEveryDayIsRenewed) {
  ExpiryNotice notice;
  const CertificateLife life = life_of(hours(24));
  EXPECT_EQ(notice.look(life, life.end - hours(8)), Say::nothing) << "it is renewed by now, as is usual";
  EXPECT_EQ(notice.look(life, life.end - hours(6)), Say::soon);
  EXPECT_EQ(notice.look(life, life.end - hours(2)), Say::nothing);
  EXPECT_EQ(notice.look(life, life.end - hours(1)), Say::very_soon);
}

TEST(ExpiryNotice, SaysOnlyTheWorstOfACertificateThatIsSeenLate) {
  ExpiryNotice notice;
  const CertificateLife life = life_of(90 * kDay);
  EXPECT_EQ(notice.look(life, life.end - hours(2)), Say::very_soon);
  EXPECT_EQ(notice.look(life, life.end - hours(1)), Say::nothing);
}

TEST(ExpiryNotice, BeginsAgainWithAnotherCertificate) {
  ExpiryNotice notice;
  const CertificateLife life = life_of(90 * kDay);
  EXPECT_EQ(notice.look(life, life.end), Say::over);
  EXPECT_EQ(notice.look(life_of(180 * kDay), life.end), Say::nothing);
  EXPECT_EQ(notice.look(life_of(100 * kDay), life.end), Say::soon);
  EXPECT_EQ(notice.look(std::nullopt, life.end), Say::nothing);
}

class CertificatesEnd : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { init_log("test", "info"); }
  TlsOptions lasting(seconds life) const {
    test::Wanted wanted = local_server();
    wanted.from = -90 * kDay;
    wanted.to = life;
    return tls_.server(wanted);
  }
  /// In seconds from now.
  static double ends_in(Tls& tls) {
    return std::chrono::duration<double>(tls.certificates_end().value() - std::chrono::system_clock::now()).count();
  }
  template <class Do>
  static std::string logged(Do&& work) {
    testing::internal::CaptureStderr();
    work();
    return testing::internal::GetCapturedStderr();
  }

  test::TempDir dir_;
  const test::TestTls tls_{dir_.path()};
};

TEST_F(CertificatesEnd, IsThatOfTheFirstInTheFile) {
  const TlsOptions options = lasting(90 * kDay);
  EXPECT_NEAR(ends_in(**Tls::server(options)), seconds(90 * kDay).count(), 120);
  // As with one that is between it and its CA.
  test::Wanted between = test::named("between");
  between.to = 30 * kDay;
  std::ofstream(options.cert, std::ios::app) << std::ifstream(tls_.ca.issue("between", between).cert).rdbuf();
  EXPECT_NEAR(ends_in(**Tls::server(options)), seconds(30 * kDay).count(), 120);
}

TEST_F(CertificatesEnd, OfAReceiverWithoutOneThereIsNone) {
  EXPECT_FALSE((*Tls::client(tls_.client()))->certificates_end());
}

TEST_F(CertificatesEnd, AnEndThatNoClockReachesIsFarAway) {
  EXPECT_GT(ends_in(**Tls::server(lasting(hours(24) * 365 * 7900))), seconds(200 * 365 * kDay).count());
}

TEST_F(CertificatesEnd, IsWarnedOfAtTheStartAndAfterARenewal) {
  TlsOptions options;
  std::shared_ptr<Tls> tls;
  options = lasting(90 * kDay);
  EXPECT_THAT(logged([&] { tls = *Tls::server(options); }), Not(HasSubstr("tls_certificate")));
  options = lasting(13 * kDay);
  EXPECT_THAT(logged([&] { tls = *Tls::server(options); }), HasSubstr("tls_certificate_expires cert="));
  EXPECT_THAT(logged([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(1100));
                tls->run_maintenance();
              }),
              Not(HasSubstr("tls_certificate")))
      << "said once";
  const std::string said = logged([&] {
    lasting(20 * hours(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    tls->run_maintenance();
  });
  EXPECT_THAT(said, HasSubstr("tls_reloaded"));
  EXPECT_THAT(said, HasSubstr("left_h=19\n"));
  EXPECT_NEAR(ends_in(*tls), seconds(hours(20)).count(), 120);
}

TEST_F(CertificatesEnd, ThatHasComeIsSaid) {
  std::shared_ptr<Tls> tls = *Tls::server(lasting(seconds(5)));
  EXPECT_THAT(logged([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(6100));
                tls->run_maintenance();
              }),
              HasSubstr("tls_certificate_expired cert="));
}

}  // namespace
}  // namespace deltasync::net

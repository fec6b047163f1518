// What each dialect asks for and answers, without HTTP; and that no question is answered with anything but JSON or text
// of a status that clients know.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "receiver/control/routes.hpp"
#include "tests/receiver/control/fake_engine.hpp"
#include "tests/support/temp_dir.hpp"

namespace deltasync::control {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;

class Routes : public testing::Test {
 protected:
  std::string client = "10.0.0.1";
  test::Notes notes;
  test::FakeEngine engine{notes};
  test::FakeWeights weights{notes};
  Service service{engine, weights, 30s};
  ControlOptions options{.model = "tiny", .world_size = 2};
  Desk desk{service, engine, options, weights, json::object(), {}, false, {}, {}, {}};

  net::HttpPage ask(std::span<const Route> routes, const std::string& target, const std::string& body = "") {
    const std::string path = target.substr(0, target.find('?'));
    for (const Route& route : routes) {
      if (route.path != path) continue;
      const auto parsed = parse_ask({.method = "POST", .target = target, .body = body, .client = client});
      return parsed ? route.answer(desk, *parsed) : net::HttpPage{400, "", parsed.error().message()};
    }
    return {404, "", ""};
  }
  json v1(const std::string& target, const std::string& body = "", unsigned status = 200) {
    const net::HttpPage page = ask(v1_routes(), target, body);
    EXPECT_EQ(page.status, status) << page.body;
    return json::parse(page.body);
  }
  json vllm(const std::string& target, const std::string& body = "", unsigned status = 200) {
    const net::HttpPage page = ask(vllm_routes(), target, body);
    EXPECT_EQ(page.status, status) << page.body;
    return json::parse(page.body);
  }
  json sglang(const std::string& target, const std::string& body = "", unsigned status = 200) {
    const net::HttpPage page = ask(sglang_routes(), target, body);
    EXPECT_EQ(page.status, status) << page.body;
    return json::parse(page.body);
  }
};

TEST_F(Routes, FastDeployUpdatesWhilePaused) {
  EXPECT_EQ(v1("/v1/update_weights", "{}", 500)["error_message"],
            "Pause LLM Engine first before calling updating weights");
  json page = v1("/v1/pause");
  EXPECT_EQ(page["status"], "success");
  EXPECT_TRUE(page["request_id"].is_string());
  EXPECT_TRUE(page["result"].is_null());
  EXPECT_EQ(v1("/v1/is_paused")["result"]["is_paused"], true);
  v1("/v1/pause");  // again
  page = v1("/v1/update_weights", R"({"version": "5", "verify_checksum": true, "unknown": 1})");
  EXPECT_EQ(page["result"], json::parse(R"([{"version": "5"}])"));
  EXPECT_EQ(v1("/v1/is_paused")["result"]["is_paused"], true);
  v1("/v1/resume");
  v1("/v1/resume");
  EXPECT_EQ(v1("/v1/is_paused")["result"]["is_paused"], false);
}

TEST_F(Routes, FastDeployWakesWhatSleepsAndServes) {
  v1("/v1/sleep?tags=weight");
  EXPECT_EQ(v1("/v1/sleep?tags=weights", "", 400)["error_message"],
            "Unsupported tag weights, expected one of weight, kv_cache");
  // The trap of the reference: both woken, of which one had not slept.
  v1("/v1/wakeup?tags=weight,kv_cache");
  EXPECT_TRUE(service.standing().engine.serves());
  EXPECT_EQ(service.standing().label, "1");
  EXPECT_EQ(ask(v1_routes(), "/clear_load_weight").status, 200U);
  EXPECT_EQ(ask(v1_routes(), "/clear_load_weight").body, "");
  notes.fail("fill");
  EXPECT_EQ(ask(v1_routes(), "/update_model_weight").status, 404U);
  EXPECT_FALSE(service.standing().engine.serves());
  EXPECT_EQ(ask(v1_routes(), "/update_model_weight").status, 200U);
  EXPECT_TRUE(service.standing().engine.serves());
}

TEST_F(Routes, FastDeployAborts) {
  EXPECT_EQ(v1("/v1/abort_requests", R"({"abort_all": true})")["result"]["aborted"], 7);
  EXPECT_EQ(v1("/v1/abort_requests", R"({"req_ids": ["a"]})")["result"]["aborted"], 1);
  v1("/v1/abort_requests", "{}", 400);
  v1("/v1/abort_requests", R"({"req_ids": "a"})", 400);
}

TEST_F(Routes, VllmUpdatesBetweenStartAndFinish) {
  vllm("/update_weights", R"({"update_info": {}})", 409);
  EXPECT_EQ(vllm("/pause?mode=keep")["status"], "paused");
  EXPECT_EQ(vllm("/is_paused")["is_paused"], true);
  vllm("/init_weight_transfer_engine", R"({"init_info": {"a": 1}})");
  vllm("/start_weight_update", R"({"is_checkpoint_format": true})");
  vllm("/finish_weight_update", "", 409);  // nothing has come
  vllm("/start_weight_update");            // by a trainer that was started again
  notes.take();
  EXPECT_EQ(vllm("/update_weights", R"({"update_info": {"version": 4, "verify": true}})")["message"],
            "Weights updated");
  EXPECT_TRUE(weights.verify);
  EXPECT_EQ(notes.take(), (std::vector<std::string>{"stage", "commit"}));  // caches are as the pause left them
  vllm("/finish_weight_update", R"({"weight_version": "four"})");
  vllm("/finish_weight_update", "", 409);
  EXPECT_EQ(vllm("/resume")["status"], "resumed");
  EXPECT_EQ(vllm("/weight_info")["weight_version"], "four");
  EXPECT_EQ(service.standing().version->id.number, 4U);
  vllm("/pause?mode=later", "", 422);
}

TEST_F(Routes, AClientNamesTheVersionThatItBrought) {
  const auto update = [&](const std::string& who, int version) {
    client = who;
    vllm("/update_weights", R"({"update_info": {"version": )" + std::to_string(version) + "}}");
  };
  const auto finish = [&](const std::string& who, const std::string& label, unsigned status) {
    client = who;
    return vllm("/finish_weight_update", R"({"weight_version": ")" + label + "\"}", status).dump();
  };
  vllm("/start_weight_update");
  update("10.0.0.1", 4);
  client = "10.0.0.2";
  vllm("/start_weight_update");
  update("10.0.0.2", 5);
  const std::string overtaken = finish("10.0.0.1", "four", 409);
  EXPECT_NE(overtaken.find("version 4 should be called four, but 5 is live by now"), std::string::npos) << overtaken;
  const std::string stranger = finish("10.0.0.3", "five", 409);
  EXPECT_NE(stranger.find("come from 10.0.0.3, but from 2 other clients"), std::string::npos) << stranger;
  finish("10.0.0.2", "five", 200);
  EXPECT_EQ(vllm("/weight_info")["weight_version"], "five");
  // By another dialect's route.
  vllm("/start_weight_update");
  update("10.0.0.1", 6);
  sglang("/pull_weights", R"({"target_version": "7"})");
  const std::string gone = finish("10.0.0.1", "six", 409);
  EXPECT_NE(gone.find("version 6 should be called six, but 7 is live by now"), std::string::npos) << gone;
  EXPECT_EQ(vllm("/weight_info")["weight_version"], "7");
}

/// Behind a proxy or a cluster's addresses each of its connections may come from elsewhere.
TEST_F(Routes, AClientMayHaveAnotherAddressAtEachCall) {
  for (int version = 3; version < 5; ++version) {
    client = "10.0.0.1";
    vllm("/start_weight_update");
    client = "10.0.0.2";
    vllm("/update_weights", R"({"update_info": {"version": )" + std::to_string(version) + "}}");
    client = "10.0.0.3";
    vllm("/finish_weight_update", R"({"weight_version": "step"})");
    EXPECT_EQ(vllm("/weight_info")["weight_version"], "step");
  }
}

TEST_F(Routes, WhatNobodyTakesTheWeightsFromIsNoUpdate) {
  const auto update = [&](const std::string& info, unsigned status) {
    return vllm("/update_weights", R"({"update_info": )" + info + "}", status).dump();
  };
  vllm("/start_weight_update");
  // As vLLM's trainers have it for its engine of CUDA IPC.
  const std::string tensors =
      R"({"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[1]], "ipc_handles_pickled": "gASV"})";
  for (const std::string& info : {tensors, "[" + tensors + ", " + tensors + "]"}) {
    EXPECT_NE(update(info, 501).find("tensors do not come this way"), std::string::npos);
  }
  EXPECT_NE(update(R"({"version_id": "7"})", 400).find("version_id"), std::string::npos);
  for (const char* info : {"[]", "[1]", "7", R"([{"version": 4}, {"version": 5}])"}) update(info, 400);
  EXPECT_EQ(notes.take(), std::vector<std::string>());
  vllm("/finish_weight_update", "", 409);  // nothing has come
  update(R"([{"version": 4}, {"version": 4}])", 200);
  EXPECT_EQ(weights.version, "4");
}

TEST_F(Routes, AnUpdateHasItsClientsTime) {
  const auto left = [&] { return weights.deadline - std::chrono::steady_clock::now(); };
  vllm("/start_weight_update");
  vllm("/update_weights", R"({"update_info": {"version": 3, "deadline_ms": 20000}})");
  EXPECT_LE(left(), 20s);
  vllm("/update_weights", R"({"update_info": {"version": 3, "deadline_ms": "soon"}})", 400);
  const std::string asked = R"({"model_path": "tiny", "load_format": "deltasync", "weight_version": "4", "manifest": )";
  sglang("/update_weights_from_disk", asked + R"({"deltasync": {"timeout": 19.5}}})");
  EXPECT_LE(left(), 19500ms);
  sglang("/update_weights_from_disk", asked + R"({"deltasync": {"timeout": -1}}})", 400);
}

TEST_F(Routes, PrimeRlNamesADirectory) {
  EXPECT_EQ(vllm("/update_weights", R"({"weight_dir": "/mnt/broadcasts/step_0"})")["status"], "ok");
  EXPECT_EQ(weights.version, "step_0");
  EXPECT_TRUE(service.standing().engine.serves());
  vllm("/update_weights", R"({"weight_dir": "/mnt/checkpoints/step_12/weight/"})");
  EXPECT_EQ(weights.version, "step_12");
  EXPECT_EQ(vllm("/update_weights", R"({"weight_dir": null})")["status"], "ok");
  EXPECT_EQ(weights.version, "");
  const std::string why = vllm("/update_weights", R"({"weight_dir": "/mnt/latest"})", 400)["error"];
  EXPECT_NE(why.find("/mnt/latest"), std::string::npos);
  const deltasync::test::TempDir directory;
  const std::string written = (directory.path() / "step_13").string();
  std::filesystem::create_directories(written);
  std::ofstream(written + "/model-00001-of-00001.safetensors") << "weights";
  vllm("/update_weights", json({{"weight_dir", written}}).dump());
  EXPECT_EQ(weights.directory, written);
  EXPECT_EQ(weights.version, "");
}

TEST_F(Routes, WhoWaitsForOthersIsToldThatTheyWillNotCome) {
  vllm("/init_weight_transfer_engine", R"({"init_info": {"master_address": "h", "master_port": 1}})", 501);
  for (const char* path : {"/areal_init_weights_update_group", "/areal_set_update_weight_meta",
                           "/areal_update_weights_xccl", "/load_lora_adapter", "/v1/load_lora_adapter"}) {
    EXPECT_TRUE(vllm(path, "{}", 501)["message"].is_string()) << path;
  }
  sglang("/load_lora_adapter", "{}", 501);
}

TEST_F(Routes, TheEnginesProgramSaysMoreOfIt) {
  EXPECT_FALSE(vllm("/v1/models")["data"][0].contains("max_model_len"));
  EXPECT_EQ(vllm("/server_info")["dp_size"], 1);
  const json told = {{"dp_size", 2}, {"vllm_config", {{"model_config", {{"max_model_len", 4096}}}}}};
  Desk other{service, engine, options, weights, told, {}, false, {}, {}, {}};
  const json page = json::parse(server_info(other, {}).body);
  EXPECT_EQ(page["dp_size"], 2);
  EXPECT_EQ(page["vllm_config"]["model_config"], json({{"model", "tiny"}, {"max_model_len", 4096}}));
  EXPECT_EQ(page["tp_size"], 2);
  for (const Route& route : vllm_routes()) {
    if (route.path != "/v1/models") continue;
    EXPECT_EQ(json::parse(route.answer(other, {}).body)["data"][0]["max_model_len"], 4096);
  }
}

TEST_F(Routes, WhatNoLaterTryRepairsIsNoFailureOfTheServer) {
  for (const Errc code : {Errc::gone, Errc::layout_mismatch, Errc::version_conflict}) {
    EXPECT_EQ(status_of(Error(code, "")), 409U);
  }
  EXPECT_EQ(status_of(Error(Errc::connection, "")), 500U);
}

TEST_F(Routes, VllmSleeps) {
  EXPECT_EQ(vllm("/sleep?level=1")["level"], 1);
  EXPECT_EQ(vllm("/is_sleeping")["is_sleeping"], true);
  vllm("/resume", "", 409);
  EXPECT_EQ(vllm("/wake_up?tags=weights")["status"], "sleeping");
  EXPECT_EQ(vllm("/wake_up?tags=kv_cache")["status"], "awake");
  EXPECT_TRUE(service.standing().engine.serves());
  vllm("/sleep");
  EXPECT_EQ(vllm("/wake_up")["status"], "awake");
  EXPECT_TRUE(service.standing().engine.serves());
  vllm("/sleep?level=3", "", 422);
}

TEST_F(Routes, SglangReleasesMemoryOfAPausedEngine) {
  EXPECT_EQ(sglang("/pause_generation", "{}")["status"], "ok");
  EXPECT_TRUE(sglang("/release_memory_occupation", R"({"tags": ["weights", "kv_cache"]})").is_null());
  EXPECT_TRUE(sglang("/resume_memory_occupation", R"({"tags": ["weights"]})").is_null());
  EXPECT_TRUE(sglang("/resume_memory_occupation", R"({"tags": ["kv_cache"]})").is_null());
  EXPECT_FALSE(service.standing().engine.serves());  // its client has paused it
  EXPECT_EQ(sglang("/continue_generation", "{}")["status"], "ok");
  EXPECT_TRUE(service.standing().engine.serves());
  EXPECT_TRUE(sglang("/release_memory_occupation", R"({"tags": ["wieghts"]})", 400)["error"]["message"].is_string());
}

TEST_F(Routes, SlimePullsAndThenNamesTheDirectory) {
  const json page =
      sglang("/pull_weights", R"({"local_checkpoint_dir": "/local", "source_dir": "/x", "target_version": 3})");
  EXPECT_EQ(page["success"], true);
  EXPECT_EQ(service.standing().version->id.number, 3U);
  EXPECT_EQ(sglang("/update_weights_from_disk", R"({"model_path": "/local", "weight_version": "3"})")["success"], true);
  EXPECT_EQ(sglang("/get_weight_version")["weight_version"], "3");
  EXPECT_EQ(sglang("/model_info")["model_path"], "tiny");
  EXPECT_EQ(sglang("/server_info")["tp_size"], 2);
  notes.fail("stage");
  EXPECT_EQ(sglang("/pull_weights", R"({"target_version": 4})", 400)["success"], false);
  // What was there before is not named after what did not come: the directory itself is read.
  notes.take();
  sglang("/update_weights_from_disk", R"({"model_path": "/local", "weight_version": "4"})");
  EXPECT_EQ(notes.take().front(), "stage");
  EXPECT_EQ(weights.directory, "/local");
}

TEST_F(Routes, AnUpdateSinceThePullIsNotNamedAfterItsDirectory) {
  sglang("/pull_weights", R"({"local_checkpoint_dir": "/local", "target_version": 3})");
  vllm("/update_weights", R"({"weight_dir": null})");
  notes.take();
  sglang("/update_weights_from_disk", R"({"model_path": "/local"})");
  EXPECT_EQ(notes.take().front(), "stage");
}

TEST_F(Routes, DirectoriesAreTaken) {
  EXPECT_EQ(sglang("/update_weights_from_disk", R"({"model_path": "/a", "weight_version": "a"})")["success"], true);
  EXPECT_EQ(notes.take(), (std::vector<std::string>{"stage", "stop_admission", "hold", "commit", "reset_caches",
                                                    "release_hold", "resume_admission"}));
  EXPECT_EQ(weights.directory, "/a");
  EXPECT_EQ(service.standing().label, "a");
  const char* aborts = R"({"model_path": "/b", "abort_all_requests": true, "flush_cache": false})";
  EXPECT_EQ(sglang("/update_weights_from_disk", aborts)["success"], true);
  EXPECT_EQ(notes.take(),
            (std::vector<std::string>{"stage", "stop_admission", "abort", "wait_idle", "commit", "resume_admission"}));
  sglang("/update_weights_from_disk", R"({"model_path": "tiny", "load_format": "deltasync", "weight_version": "7"})");
  EXPECT_EQ(weights.version, "7");
  EXPECT_EQ(weights.directory, "");
  sglang("/update_weights_from_disk", "{}", 400);
  notes.fail("stage");
  EXPECT_EQ(sglang("/update_weights_from_disk", R"({"model_path": "/c"})", 400)["success"], false);
  EXPECT_EQ(vllm("/areal_update_weights", R"({"model_path": "/d"})")["success"], true);
  EXPECT_EQ(weights.directory, "/d");
  vllm("/areal_update_weights", "{}", 400);
  vllm("/areal_pause_generation");
  EXPECT_FALSE(service.standing().engine.serves());
  v1("/v1/update_weights", R"({"directory": "/e"})");
  EXPECT_EQ(weights.directory, "/e");
  vllm("/areal_continue_generation");
  EXPECT_TRUE(service.standing().engine.serves());
}

TEST_F(Routes, ThePlacementNamesTensors) {
  EXPECT_EQ(v1("/v1/placement")["result"], json::parse(R"({"qkv": ["k_proj", "q_proj"], "up": ["up"]})"));
}

TEST_F(Routes, TheCacheSaltIsOfTheVersion) {
  const json first = vllm("/weight_info");
  EXPECT_EQ(first["cache_salt"], "0000000000000009:1");
  vllm("/update_weight_version", R"({"new_version": "one"})");
  EXPECT_EQ(vllm("/weight_info")["cache_salt"], first["cache_salt"]);
  sglang("/pull_weights");
  EXPECT_NE(sglang("/model_info")["cache_salt"], first["cache_salt"]);
}

TEST_F(Routes, AVersionIsNamedIfThereIsOne) {
  const auto renamed = [&](const std::string& label, unsigned status) {
    return vllm("/update_weight_version", json({{"new_version", label}}).dump(), status);
  };
  renamed("", 400);
  renamed("one\r\nSet-Cookie: a", 400);
  renamed(std::string(128, 'a'), 400);
  sglang("/update_weights_from_disk", R"({"model_path": "/a", "weight_version": "\u0007"})", 400);
  EXPECT_EQ(notes.take(), std::vector<std::string>());
  EXPECT_EQ(vllm("/weight_info")["weight_version"], "1");
  renamed("eins ü", 200);
  EXPECT_EQ(vllm("/weight_info")["weight_version"], "eins ü");
  weights.become_void();
  EXPECT_EQ(renamed("two", 409)["success"], false);
}

TEST_F(Routes, AnUpdateAfterAVoidOneResetsCaches) {
  weights.void_on_failure = true;
  notes.fail("commit");
  vllm("/update_weights", R"({"weight_dir": null})", 500);
  EXPECT_FALSE(service.standing().engine.serves());
  notes.take();
  vllm("/update_weights", R"({"weight_dir": null})");
  EXPECT_EQ(notes.take(),
            (std::vector<std::string>{"stage", "commit", "reset_caches", "release_hold", "resume_admission"}));
}

TEST_F(Routes, CachesAreResetBeforeTheirMemoryGoes) {
  vllm("/pause?mode=wait&clear_cache=false");
  notes.take();
  vllm("/sleep");
  EXPECT_EQ(notes.take(), (std::vector<std::string>{"reset_caches", "release", "release weights", "release kv_cache"}));
  vllm("/wake_up?tags=weights");
  notes.take();
  vllm("/update_weights", R"({"weight_dir": null})");
  EXPECT_EQ(notes.take(), (std::vector<std::string>{"stage", "commit"}));  // there are no caches
}

TEST_F(Routes, AFlagIsWhatItSaysOrAnError) {
  for (const char* const no : {"false", "0", "no", "OFF", "n"}) {
    vllm("/pause?mode=wait&clear_cache=" + std::string(no));
    EXPECT_EQ(notes.take().back(), "wait_idle") << no;
    vllm("/resume");
    notes.take();
  }
  EXPECT_EQ(ask(vllm_routes(), "/pause?mode=wait&clear_cache=never").status, 422U);
  EXPECT_EQ(notes.take(), std::vector<std::string>());
}

TEST_F(Routes, AFlushHasItsClientsTimeout) {
  notes.block("reset_caches");
  EXPECT_EQ(ask(sglang_routes(), "/flush_cache?timeout=0.02").status, 400U);
  notes.unblock();
  EXPECT_EQ(ask(sglang_routes(), "/flush_cache?timeout=0").status, 200U);
  EXPECT_EQ(ask(sglang_routes(), "/flush_cache?timeout=soon").status, 400U);
  EXPECT_EQ(vllm("/v1/models")["data"][0]["id"], "tiny");
}

TEST_F(Routes, DeepBodiesAreRefused) {
  const std::string deep = R"({"update_info": {"a": )" + std::string(100'000, '[') + std::string(100'000, ']') + "}}";
  EXPECT_EQ(ask(vllm_routes(), "/update_weights", deep).status, 400U);
}

TEST_F(Routes, NoQuestionOfAnyKindIsUnanswered) {
  const char* bodies[] = {"",
                          "{}",
                          "[]",
                          "null",
                          "{",
                          R"({"tags": 1})",
                          R"({"mode": []})",
                          R"({"version": {}})",
                          R"({"update_info": [1]})",
                          R"({"new_version": "x"})",
                          R"({"rid": "a"})",
                          "\xff\xfe"};
  const char* queries[] = {"", "?", "?tags=", "?tags=%zz&mode=%41", "?level=9&mode=abort", "?timeout=nan", "?&&=&"};
  for (const auto routes : {v1_routes(), vllm_routes(), sglang_routes()}) {
    for (const Route& route : routes) {
      for (const char* query : queries) {
        for (const char* body : bodies) {
          const net::HttpPage page = ask(routes, std::string(route.path) + query, body);
          EXPECT_TRUE(page.status >= 200 && page.status < 600) << route.path << query << ' ' << body;
          if (page.content_type == kJson && !page.body.empty()) {
            EXPECT_FALSE(json::parse(page.body, nullptr, false).is_discarded()) << page.body;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace deltasync::control

// SPDX-License-Identifier: BSD-3-Clause
// PPO in mixed precision: carts learn to come to rest in the middle of a track.
#include <torch/torch.h>
#include <torchamp/training_step.h>

#include <cstdint>
#include <cstdio>
#include <vector>

namespace nn = torch::nn;

namespace {

constexpr std::int64_t carts = 64, horizon = 16, parts = 4;

/// Returns the reward of each cart, and moves them.
torch::Tensor act(torch::Tensor& states, const torch::Tensor& actions) {
  const auto speed = 0.9 * states.select(1, 1) + 0.3 * actions.squeeze(1).tanh();
  const auto place = states.select(1, 0) + 0.3 * speed;
  states = torch::stack({place, speed}, 1);
  return -(place.square() + 0.1 * speed.square());
}

struct AgentImpl : nn::Module {
  /// The logarithm of the actions' probability, but for a constant.
  torch::Tensor log_probability(const torch::Tensor& states, const torch::Tensor& actions) {
    const auto away = (actions - policy->forward(states)) / deviation.exp();
    return (-0.5 * away.square() - deviation).sum(1);
  }

  /// In fp32: returns are sums of many rewards.
  torch::Tensor value_of(const torch::Tensor& states) {
    const torchamp::AutocastGuard off(states.device(), {.enabled = false});
    return value->forward(states).squeeze(1);
  }

  static nn::Sequential net() {
    return nn::Sequential(nn::Linear(2, 32), nn::Tanh(), nn::Linear(32, 32), nn::Tanh(),
                          nn::Linear(32, 1));
  }
  nn::Sequential policy = register_module("policy", net());
  nn::Sequential value = register_module("value", net());
  torch::Tensor deviation = register_parameter("deviation", torch::full({1}, -1.));
};
TORCH_MODULE(Agent);

/// What all carts have done, [carts * horizon, …].
struct Rollout {
  torch::Tensor states, actions, log_probabilities, returns, advantages;
  double mean_reward = 0.;
};

Rollout roll_out(Agent& agent, torch::Device device) {
  const torch::NoGradGuard no_grad;
  auto now = 2. * torch::rand({carts, 2}, device) - 1.;
  std::vector<torch::Tensor> states, actions, log_probabilities, rewards;
  for (std::int64_t i = 0; i < horizon; ++i) {
    states.push_back(now);
    const auto noise = torch::randn({carts, 1}, device);
    actions.push_back(agent->policy->forward(now) + agent->deviation.exp() * noise);
    log_probabilities.push_back(agent->log_probability(now, actions.back()));
    rewards.push_back(act(now, actions.back()));
  }
  auto ahead = agent->value_of(now);
  std::vector<torch::Tensor> returns(rewards.size());
  for (std::size_t i = rewards.size(); i-- > 0;) returns[i] = ahead = rewards[i] + 0.95 * ahead;
  Rollout all{torch::cat(states),
              torch::cat(actions),
              torch::cat(log_probabilities),
              torch::cat(returns),
              {},
              torch::cat(rewards).mean().item<double>()};
  all.advantages = all.returns - agent->value_of(all.states);
  all.advantages = (all.advantages - all.advantages.mean()) / all.advantages.std();
  return all;
}

struct Losses {
  torch::Tensor all, of_values;
};

Losses losses_of(Agent& agent, const Rollout& done, const torch::Tensor& rows) {
  const auto part = [&](const torch::Tensor& of) { return of.index_select(0, rows); };
  const auto states = part(done.states), advantages = part(done.advantages);
  const auto now = agent->log_probability(states, part(done.actions));
  const auto ratio = (now - part(done.log_probabilities)).exp();
  const auto gain = torch::minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages);
  const auto of_values = torch::mse_loss(agent->value_of(states), part(done.returns));
  return {0.5 * of_values - gain.mean(), of_values};
}

}  // namespace

int main() {
  const torch::Device device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  torch::manual_seed(0);
  Agent agent;
  agent->to(device);
  auto policy_parameters = agent->policy->parameters();
  policy_parameters.push_back(agent->deviation);
  torchamp::FusedAdam of_policy(policy_parameters, torch::optim::AdamOptions(1e-3));
  torchamp::FusedAdam of_values(agent->value->parameters(), torch::optim::AdamOptions(3e-3));
  torchamp::TrainingStep train(agent, {of_policy, of_values}, {.max_grad_norm = 0.5});

  for (int iteration = 1; iteration <= 30; ++iteration) {
    Rollout done;
    {
      const torchamp::AutocastGuard autocast(device, train.autocast());
      done = roll_out(agent, device);
    }
    double sum = 0.;
    for (int epoch = 0; epoch < 3; ++epoch) {
      for (const auto& rows : torch::randperm(carts * horizon, device).chunk(parts)) {
        Losses losses;
        train([&] { return (losses = losses_of(agent, done, rows.to(torch::kLong))).all; });
        sum += losses.of_values.item<double>();
      }
    }
    if (iteration % 15 != 0) continue;
    std::printf("iteration %d: mean reward %.3f, value loss %.4f\n", iteration, done.mean_reward,
                sum / (3. * parts));
  }
}

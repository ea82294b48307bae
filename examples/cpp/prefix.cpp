// Asks several questions about one text at the same time. The text goes through the model once; each question has a
// session that shares its cache, and the engine takes them through the model together.
//
//   c++ -std=c++17 -o prefix prefix.cpp $(pkg-config --cflags --libs dsv4) -pthread
//   ./prefix MODEL TEXTFILE QUESTION...

#include <dsv4.hpp>

#include <fstream>
#include <future>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

std::string answer(const dsv4::Model &model, dsv4::Session session, const std::string &question, std::uint64_t seed)
{
    session.feed(model.encode(question));
    dsv4::SamplerOptions chance;
    chance.seed = seed;
    dsv4::Sampler sampler = dsv4::Sampler::create(chance);
    dsv4::GenerationOptions options;
    options.max_tokens = 40;
    std::string text;
    for (const dsv4::Piece &piece : session.generate(sampler, options)) text += piece.text;
    return text;
}

std::string read_file(const char *path)
{
    std::ifstream file(path, std::ios::binary);
    file.exceptions(std::ios::badbit | std::ios::failbit);
    return {std::istreambuf_iterator<char>(file), {}};
}

} // namespace

int main(int argc, char **argv)
{
    if (argc < 4) {
        std::cerr << "usage: prefix MODEL TEXTFILE QUESTION...\n";
        return 2;
    }
    try {
        const dsv4::Model model = dsv4::Model::open(argv[1]);
        const dsv4::Engine engine = dsv4::Engine::create(model);
        dsv4::Session base = dsv4::Session::create(engine);
        base.feed(model.info().bos_token_id);
        base.feed(model.encode(read_file(argv[2])));
        const std::vector<std::string> questions(argv + 3, argv + argc);
        std::vector<std::future<std::string>> answers;
        answers.reserve(questions.size());
        for (const std::string &question : questions)
            answers.push_back(std::async(std::launch::async, answer, std::cref(model), base.fork(), question, answers.size()));
        for (std::size_t i = 0; i < answers.size(); i++) std::cout << questions[i] << " ->" << answers[i].get() << "\n\n";
    } catch (const std::exception &error) {
        std::cerr << error.what() << '\n';
        return 1;
    }
}

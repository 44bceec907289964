"""What made-up questions and requests are about."""

from __future__ import annotations

SUBJECTS = (
    "bees", "the moon", "bread", "chess", "volcanoes", "sleep", "a small garden", "public libraries",
    "electric cars", "the French Revolution", "photosynthesis", "black holes", "coffee", "the stock market",
    "learning the piano", "a trip to Norway", "whales", "antibiotics", "the printing press", "rivers",
    "friendship", "a birthday party", "time management", "vaccines", "the Roman Empire", "earthquakes",
    "recycling", "a job interview", "basketball", "the ocean", "robots", "inflation", "the human heart",
    "a rainy day", "solar power", "dinosaurs", "democracy", "poetry", "running a marathon", "cheese",
    "computer viruses", "the Great Wall of China", "mountains", "nutrition", "painting with watercolours",
    "gravity", "trade unions", "a lost dog", "the internet", "tea", "climate change", "cats", "glaciers",
    "the Olympic Games", "writing a novel", "bridges", "wheat", "the immune system", "opera", "deserts",
    "saving money", "the periodic table", "a haunted house", "traffic in cities", "honesty", "DNA",
    "the Silk Road", "birds", "machine learning", "vegetarian cooking", "the speed of light", "islands",
    "a new neighbour", "ancient Egypt", "insurance", "the violin", "forest fires", "school uniforms",
    "the steam engine", "clouds", "a science fair", "bicycles", "memory", "the Amazon rainforest", "salt",
    "remote work", "planets", "the Second World War", "fashion", "probability", "dreams", "lighthouses",
    "the English language", "sharks", "a city council", "paper", "prime numbers", "a winter storm",
)  # fmt: skip

ASKED = (
    "What is the main reason for {s}?", "who first wrote about {s}", "When did people begin to study {s}?",
    "What is {s}?", "where can you find {s}", "Name three facts about {s}.", "How do {s} work?",
    "why are {s} important", "What is the difference between {s} and music?",
    "How many kinds of {s} are there?", "what is the meaning of {s}", "What country is best known for {s}?",
)  # fmt: skip

CHATTED = (
    "Write a short story about {s}.", "Write a poem about {s} in four lines.",
    "Explain {s} to a child of ten.", "Give me five tips about {s}.", "Write an email to a friend about {s}.",
    "Pretend to be a teacher and give a short lesson about {s}.",
    "List the advantages and disadvantages of {s}.",
    "Compose a travel blog post about {s}.", "Describe {s} in vivid detail.",
    "What should everybody know about {s}? Answer in two paragraphs.",
    "Imagine a conversation between two experts on {s}.", "Write a speech of one minute about {s}.",
    "Create a plan of three steps for a project on {s}.", "Summarise the history of {s}.",
    "Act as a critic and review a book about {s}.", "How could {s} change in the next fifty years?",
    "Write a Python program that prints a report about {s}.", "Make a table of facts about {s}.",
)  # fmt: skip

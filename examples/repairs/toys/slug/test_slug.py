from slug import slug

assert slug("Hello Big World") == "hello-big-world"

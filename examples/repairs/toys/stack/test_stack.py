from stack import Stack

stack = Stack()
stack.push(1)
stack.push(2)
assert stack.pop() == 2

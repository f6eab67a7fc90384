import re, sys, collections
text = open(sys.argv[1], errors="replace").read()
blocks = re.split(r"\n(?==========\s+(?:Error|Warning|Info|ERROR|WARN))", text)
c = collections.Counter()
for b in blocks[1:]:
    kind = re.search(r"(Error|Warning|Info|ERROR|WARN)[^\n]*?(Race|hazard|Potential)[^\n]*", b)
    head = re.sub(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)|\d+ bytes?", "_", b.splitlines()[0])[:110]
    places = re.findall(r"(Write|Read) Thread[^\n]*? at ([^\n]*?)(?:\+0x[0-9a-f]+)?(?: in ([^\n]*))?$", b, re.M)
    where = re.findall(r"in ([\w/.]+\.py:\d+)|at (\w+)\+0x", b)
    c[head, tuple(sorted({x or y for x, y in where}))] += 1
for (h, w), n in c.most_common(60): print(n, h, "|", " ".join(p.split("/")[-1] for p in w))
print(re.findall(r"RACECHECK SUMMARY[^\n]*", text))
